"""A frozen instance, and a network that carries one direction only; real processes, stopped and not
killed."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import httpx
from support.pd import GREEDY, ask, instance, prefill, prompt_of, wait_until
from support.pd_processes import body_of, serving
from support.programs import ranks_of

from mooncake_engine.config import Role

LEASE_S = 1.5
TIMEOUT_S = 60.0
OPTIONS = ("--transport", "shm", "--lease-seconds", str(LEASE_S))
IN_PROCESS = {"transports": ("shm",), "lease_s": LEASE_S}
PROMPTS = [prompt_of(200, seed=seed) for seed in range(3)]


def test_frozen_decode_instance_holds_no_blocks_of_peer(model: Path) -> None:
    """P frees blocks whose lease D does not renew. When D continues, it computes the prompt itself,
    with the right tokens."""

    async def main() -> None:
        async with instance(model) as single:
            expected = (await ask(single, PROMPTS[0])).tokens
        async with instance(model, Role.PREFILL, **IN_PROCESS) as first:
            with serving(model, "decode", *OPTIONS, "--num-kv-blocks", "20") as frozen:
                params = [await prefill(first, prompt) for prompt in PROMPTS]
                frozen.program.process.send_signal(signal.SIGSTOP)
                pending = asyncio.create_task(
                    frozen.complete(body_of(PROMPTS[0], GREEDY, params[0]))
                )
                await first.check_clean(TIMEOUT_S)
                assert first.stat("leases_expired") == len(PROMPTS)
                frozen.program.process.send_signal(signal.SIGCONT)
                answer = await asyncio.wait_for(pending, TIMEOUT_S)
                assert answer["choices"][0]["token_ids"] == expected
                await frozen.wait_until_idle(TIMEOUT_S)

    asyncio.run(main())


def test_decode_instance_with_hung_steps_releases_leases(model: Path) -> None:
    """The connector's thread lives and could renew leases for ever; one of the ranks is stopped."""

    async def main() -> None:
        async with instance(model, Role.PREFILL, **IN_PROCESS) as first:
            options = (*OPTIONS, "--tp-size", "2", "--step-timeout-seconds", "20")
            with serving(model, "decode", *options) as hung:
                os.kill(ranks_of(hung.program)[1], signal.SIGSTOP)
                hanging = asyncio.create_task(hung.complete(body_of(PROMPTS[0], GREEDY)))
                params = [await prefill(first, prompt) for prompt in PROMPTS[1:]]
                waiting = [
                    asyncio.create_task(hung.complete(body_of(prompt, GREEDY, wanted)))
                    for prompt, wanted in zip(PROMPTS[1:], params, strict=True)
                ]
                await first.check_clean(TIMEOUT_S)
                ended = await asyncio.gather(hanging, *waiting, return_exceptions=True)
                assert all(isinstance(end, httpx.HTTPError) for end in ended)
                status = await asyncio.to_thread(hung.program.wait, TIMEOUT_S)
                assert status == 1
            assert (await ask(first, PROMPTS[0])).tokens

    asyncio.run(main())


class OneWay:
    """Forwards bytes between two ports, until told to drop those from the server."""

    def __init__(self) -> None:
        self.is_cut = threading.Event()
        self.port = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: list[asyncio.StreamWriter] = []

    async def serve(
        self, target: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Serve one connection."""
        there, back = await asyncio.open_connection("127.0.0.1", target)
        self._writers += [writer, back]
        for source, sink, is_reply in ((reader, back, False), (there, writer, True)):
            task = asyncio.create_task(self._carry(source, sink, is_reply=is_reply))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _carry(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, *, is_reply: bool
    ) -> None:
        with suppress(OSError):
            while data := await source.read(1 << 16):
                if not (is_reply and self.is_cut.is_set()):
                    sink.write(data)
        if not (is_reply and self.is_cut.is_set()):
            sink.close()

    async def close(self) -> None:
        """Close every connection."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for writer in self._writers:
            writer.transport.abort()
        for _ in range(3):  # connections close
            await asyncio.sleep(0)


@asynccontextmanager
async def one_way(target: int) -> AsyncIterator[OneWay]:
    """A forwarding port in front of another one."""
    between = OneWay()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await between.serve(target, reader, writer)

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    between.port = server.sockets[0].getsockname()[1]
    try:
        yield between
    finally:
        server.close()
        await between.close()


def test_one_way_network_failure_gives_right_tokens(model: Path) -> None:
    """P receives from D, but D never receives from P: neither waits for ever, and no block is
    lost."""

    async def main() -> None:
        async with instance(model) as single:
            expected = [(await ask(single, prompt)).tokens for prompt in PROMPTS]
        async with instance(model, Role.DECODE, **IN_PROCESS) as decode:
            with serving(model, "prefill", *OPTIONS) as first:
                params = [await first.prefill(prompt) for prompt in PROMPTS]
                async with one_way(params[0]["remote_port"]) as between:
                    detour = [{**wanted, "remote_port": between.port} for wanted in params]
                    answer = await ask(decode, PROMPTS[0], GREEDY, detour[0])
                    assert answer.tokens == expected[0]
                    assert decode.stat("load_failures") == 0
                    between.is_cut.set()
                    pending = [
                        ask(decode, prompt, GREEDY, wanted)
                        for prompt, wanted in zip(PROMPTS[1:], detour[1:], strict=True)
                    ]
                    answers = await asyncio.wait_for(asyncio.gather(*pending), TIMEOUT_S)
                    assert [found.tokens for found in answers] == expected[1:]
                    assert decode.stat("load_failures") == len(answers)
                    await wait_until(lambda: decode.is_idle, TIMEOUT_S, decode.describe)
                await first.wait_until_idle(TIMEOUT_S)
            await decode.check_clean(TIMEOUT_S)

    asyncio.run(main())
