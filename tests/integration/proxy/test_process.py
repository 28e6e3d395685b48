"""The proxy as a process: start, output, signals, workers."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
from support.proxy_fakes import Behaviour, FakeInstance, text_of
from support.proxy_fakes_client import BODY


@asynccontextmanager
async def proxy(
    *flags: str, stderr: int | None = None
) -> AsyncIterator[tuple[str, asyncio.subprocess.Process]]:
    """A proxy process and its URL, ended with SIGTERM."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "mooncake_proxy",
        "--port",
        "0",
        *flags,
        stdout=asyncio.subprocess.PIPE,
        stderr=stderr,
    )
    try:
        assert process.stdout is not None
        line = (await asyncio.wait_for(process.stdout.readline(), 10)).decode()
        yield line.split()[-1], process
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), 10) == 0


@asynccontextmanager
async def pair() -> AsyncIterator[tuple[FakeInstance, FakeInstance]]:
    """One P and one D."""
    both = FakeInstance("p0"), FakeInstance("d0")
    for fake in both:
        await fake.start()
    both[0].peers = {"d0": both[1]}
    try:
        yield both
    finally:
        for fake in both:
            await fake.kill()


def test_it_starts_and_ends_on_sigterm() -> None:
    async def main() -> None:
        async with (
            pair() as (p, d),
            proxy("--prefill", p.url, "--decode", d.url) as (url, _),
            httpx.AsyncClient(base_url=url) as client,
        ):
            answer = await client.post("/v1/completions", json=BODY)
            assert answer.json()["choices"][0]["text"] == text_of(5)

    asyncio.run(main())


def test_a_running_stream_ends_before_the_process_does() -> None:
    async def main() -> None:
        async with pair() as (p, d):
            d.behaviour.token_delay_s = 0.05
            async with proxy("--prefill", p.url, "--decode", d.url) as (url, process):
                client = httpx.AsyncClient(base_url=url)
                async with client:
                    asked = asyncio.ensure_future(
                        client.post("/v1/completions", json=BODY | {"stream": True})
                    )
                    await d.wait_for(lambda: bool(d.generated))
                    process.send_signal(signal.SIGTERM)
                    assert (await asked).text.endswith("data: [DONE]\n\n")

    asyncio.run(main())


def test_a_stop_that_reaches_the_workers_too_lets_streams_end() -> None:
    async def main() -> None:
        async with pair() as (p, d):
            d.behaviour.token_delay_s = 0.05
            flags = ("--workers", "2", "--prefill", p.url, "--decode", d.url)
            async with proxy(*flags) as (url, process):
                await _ready(url)
                async with httpx.AsyncClient(base_url=url) as client:
                    asked = asyncio.ensure_future(
                        client.post("/v1/completions", json=BODY | {"stream": True})
                    )
                    await d.wait_for(lambda: bool(d.generated))
                    for pid in (process.pid, *_children(process.pid)):  # as systemd does
                        os.kill(pid, signal.SIGTERM)
                    assert (await asked).text.endswith("data: [DONE]\n\n")

    asyncio.run(main())


def test_workers_share_one_view(tmp_path: object) -> None:
    async def main() -> None:
        async with pair() as (p, d):
            keys = f"{tmp_path}/keys"
            with open(keys, "w") as file:  # noqa: ASYNC230  # a line, in a test
                file.write("secret\n")
            flags = ("--workers", "2", "--flow", "push", "--admin-key-file", keys)
            async with proxy(*flags, "--prefill", p.url) as (url, _):
                await _ready(url)
                body = {"operation": "add", "url": d.url, "role": "decode"}
                headers = {"authorization": "Bearer secret"}
                async with httpx.AsyncClient(base_url=url) as client:
                    assert (await client.post("/instances", json=body, headers=headers)).is_success
                for _ in range(12):  # a connection each: both workers get some
                    async with httpx.AsyncClient(base_url=url) as client:
                        answer = await client.post("/v1/completions", json=BODY)
                        assert answer.status_code == 200, answer.text
                line = 'mooncake_proxy_requests_total{endpoint="/v1/completions",status="200"} 12'
                await _metrics_say(url, line)

    asyncio.run(main())


def test_running_and_waiting_count_all_workers() -> None:
    async def main() -> None:
        slow = FakeInstance(behaviour=Behaviour(delay_s=600.0))
        await slow.start()
        flags = ("--workers", "2", "--max-running", "2", "--backend-url", slow.url)
        async with proxy(*flags, "--shutdown-timeout", "0") as (url, _):
            await _ready(url)
            async with httpx.AsyncClient(base_url=url, timeout=None) as client:
                asked = [
                    asyncio.ensure_future(client.post("/v1/completions", json=BODY))
                    for _ in range(12)
                ]
                for _ in range(8):  # a connection each: both workers are asked
                    await _all_are_counted(url, len(asked))
                for request in asked:
                    request.cancel()
                await asyncio.gather(*asked, return_exceptions=True)
        await slow.kill()

    asyncio.run(main())


async def _all_are_counted(url: str, count: int) -> None:
    said: dict[str, str] = {}
    for _ in range(100):
        async with httpx.AsyncClient(base_url=url) as client:
            text = (await client.get("/metrics")).text
        said = dict(line.rsplit(" ", 1) for line in text.splitlines())
        places = [int(said[f"mooncake_proxy_{name}"]) for name in ("running", "waiting")]
        if sum(places) == count and min(places) > 0:
            return
        await asyncio.sleep(0.1)
    raise AssertionError(said)


async def _ready(url: str) -> None:
    """Until both workers listen."""
    async with httpx.AsyncClient(base_url=url) as client:
        assert (await client.get("/health")).is_success
    await asyncio.sleep(0.3)


async def _metrics_say(url: str, line: str) -> None:
    """Every worker's /metrics has the sum, as soon as counts went round."""
    said = []
    for _ in range(100):
        async with httpx.AsyncClient(base_url=url) as client:
            said = (await client.get("/metrics")).text.splitlines()
        if line in said:
            return
        await asyncio.sleep(0.1)
    raise AssertionError([text for text in said if "requests_total" in text])


def test_a_dead_worker_is_replaced() -> None:
    async def main() -> None:
        async with pair() as (p, d):
            flags = ("--workers", "2", "--prefill", p.url, "--decode", d.url)
            async with proxy(*flags, stderr=asyncio.subprocess.PIPE) as (url, process):
                await _ready(url)
                children = _children(process.pid)
                assert len(children) == 2
                os.kill(children[0], signal.SIGKILL)
                for _ in range(40):
                    await asyncio.sleep(0.1)
                    now = _children(process.pid)
                    if len(now) == 2 and children[0] not in now:
                        break
                else:
                    raise AssertionError(f"no new worker: {children} -> {_children(process.pid)}")
                async with httpx.AsyncClient(base_url=url) as client:
                    assert (await client.post("/v1/completions", json=BODY)).is_success
            assert process.stderr is not None
            assert b"worker 0 died, killed by SIGKILL, as the" in await process.stderr.read()

    asyncio.run(main())


def test_a_stop_while_a_worker_is_about_to_be_replaced_ends_all() -> None:
    async def main() -> None:
        async with pair() as (p, d):
            flags = ("--workers", "2", "--prefill", p.url, "--decode", d.url)
            async with proxy(*flags) as (url, process):
                await _ready(url)
                for pid in _children(process.pid):
                    os.kill(pid, signal.SIGKILL)
                for _ in range(1000):  # until the parent has noticed one
                    if len(_children(process.pid)) < 2:
                        break
                    await asyncio.sleep(0.01)

    asyncio.run(main())


def _children(pid: int) -> list[int]:
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return [int(child) for child in file.read().split()]


def test_bad_flags_are_explained() -> None:
    async def main() -> None:
        for flags, message in (
            (["--prefill", "ftp://x"], "wanted http://HOST:PORT"),
            (["--decode", "x"], "'x': neither scheme nor port; wanted http://HOST:PORT"),
            ([], "no instance to decode, now or later: give --prefill URL and --decode URL"),
            (["--prefill", "x:1"], "or --admin-key-file to add them over HTTP"),
            (["--api-key-file", "/nonexistent"], "key file /nonexistent"),
            (["--prefill", "x:1", "--decode", "x:1"], "given twice"),
            (["--flow", "push", "--host", "0.0.0.0"], "--advertise-url"),
        ):
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "mooncake_proxy", *flags, stderr=asyncio.subprocess.PIPE
            )
            _, stderr = await asyncio.wait_for(process.communicate(), 10)
            assert process.returncode == 2
            assert message in stderr.decode()
            assert stderr.count(b"\n") == 1, "one line"

    asyncio.run(main())
