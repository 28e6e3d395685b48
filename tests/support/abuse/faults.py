"""Attacks that control processes of the machine, or use a deployment of their own."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path

import httpx
from support.abuse.attack import Attack, Attempts, Target
from support.abuse.verdicts import Bounds
from support.programs import TINY_LLAMA, Program
from support.proxy_fakes import FakeInstance

START_S = 120.0
FROZEN_S = 1.5
TIMEOUT_S = 20.0
FAKES = 3
ERRORS = 2000
"""With paths of a kilobyte each, twice the queue limit of a stuck standard error."""


def frozen(target: Target, attempts: Attempts, name: str) -> None:
    """A process is repeatedly stopped and continued."""
    pid = target.pids[name]
    for _ in attempts:
        os.kill(pid, signal.SIGSTOP)
        try:
            time.sleep(min(FROZEN_S, max(0.5, attempts.left_s)))
        finally:
            os.kill(pid, signal.SIGCONT)
        time.sleep(0.5)


def query_of_death(_: Target, attempts: Attempts) -> None:
    """Requests that make instances hang up; they may reach two of one role, none of the other."""
    asyncio.run(_query_of_death(attempts))


async def _query_of_death(attempts: Attempts) -> None:
    prefills = [FakeInstance(f"p{i}") for i in range(FAKES)]
    decodes = [FakeInstance(f"d{i}") for i in range(FAKES)]
    for fake in (*prefills, *decodes):
        fake.behaviour.drops = True
        await fake.start()
    argv = ["mooncake_proxy", "--port", "0", "--workers", "2", "--health-interval", "0"]
    argv += ["--eject-after", "0"]
    for role, fakes in (("prefill", prefills), ("decode", decodes)):
        for fake in fakes:
            argv += [f"--{role}", fake.url]
    with _program(argv) as program:
        url = await asyncio.to_thread(_url_of, program)
        async with httpx.AsyncClient(timeout=TIMEOUT_S, trust_env=False) as client:
            for number in attempts:
                before = _num_reached(prefills), _num_reached(decodes)
                body = {"prompt": f"deadly {number}", "max_tokens": 4, "stream": number % 2 == 1}
                statuses = [(await client.post(f"{url}/v1/completions", json=body)).status_code]
                after = _num_reached(prefills) - before[0], _num_reached(decodes) - before[1]
                if after[0] > 2 or after[1]:
                    attempts.complain(f"a deadly request reached {after[0]} P and {after[1]} D")
                if min(statuses) < 400:
                    attempts.complain(f"a deadly request got {statuses}")
    for fake in (*prefills, *decodes):
        await fake.kill()


def _num_reached(fakes: Sequence[FakeInstance]) -> int:
    return sum(len(fake.seen) for fake in fakes)


@contextmanager
def _program(argv: Sequence[str], log: Path | None = None) -> Iterator[Program]:
    program = Program(argv, log)
    try:
        yield program
    finally:
        program.close()


def _url_of(program: Program) -> str:
    return "http://" + program.wait_for("http://", START_S).partition("http://")[2].split()[0]


def stuck_stderr_of_proxy(target: Target, attempts: Attempts) -> None:
    """A proxy in front of the same instances whose standard error is full or not read."""
    argv = ["mooncake_proxy", "--port", "0", "--access-log", "all", "--log-level", "debug"]
    for role, urls in (("prefill", target.prefills), ("decode", target.decodes)):
        for url in urls:
            argv += [f"--{role}", url]
    _with_stuck_stderr(target, attempts, argv)


def stuck_stderr_of_instance(target: Target, attempts: Attempts) -> None:
    """A separate instance whose standard error is full or not read."""
    argv = ["mooncake_engine.cli", "serve", "--model", str(TINY_LLAMA), "--port", "0"]
    argv += ["--threads", "1", "--num-kv-blocks", "64", "--access-log", "all"]
    _with_stuck_stderr(target, attempts, argv)


def _with_stuck_stderr(target: Target, attempts: Attempts, argv: Sequence[str]) -> None:
    for open_log in (_full, _unread):
        with ExitStack() as stack:
            log = stack.enter_context(open_log())
            program = stack.enter_context(_program(argv, log))
            url = _url_of(program)
            client = stack.enter_context(
                httpx.Client(timeout=TIMEOUT_S * target.slack, trust_env=False)
            )
            try:
                for _ in range(ERRORS):
                    client.get(f"{url}/{'x' * 1024}")
                    attempts.note()
                client.headers.update(target.headers)
                body = json.dumps({"prompt": "hello", "max_tokens": 2})
                statuses = (
                    client.get(f"{url}/health").status_code,
                    client.post(f"{url}/v1/completions", content=body).status_code,
                )
            except httpx.HTTPError as exc:
                attempts.complain(f"{argv[0]}, {open_log.__doc__}: {type(exc).__name__} {exc}")
            else:
                if statuses != (200, 200):
                    attempts.complain(f"{argv[0]}, {open_log.__doc__}: {statuses}")


@contextmanager
def _full() -> Iterator[Path]:
    """a full disk"""
    yield Path("/dev/full")


@contextmanager
def _unread() -> Iterator[Path]:
    """an unread pipe"""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "pipe"
        os.mkfifo(path)
        end = os.open(path, os.O_RDWR)  # keeps the pipe open without reading it
        try:
            yield path
        finally:
            with suppress(OSError):
                os.close(end)


ATTACKS = (
    *(
        Attack(
            f"frozen-{name}",
            f"{name} is stopped, and goes on",
            partial(frozen, name=name),
            Bounds(silence_s=10.0),
            stops=(name,),
        )
        for name in ("prefill-0", "decode-0")
    ),
    Attack(
        "query-of-death",
        "Requests during which instances hang up",
        query_of_death,
        at_least_s=4.0,
    ),
    Attack(
        "stuck-stderr-of-proxy", "A full disk, an unread pipe as its log", stuck_stderr_of_proxy
    ),
    Attack(
        "stuck-stderr-of-instance",
        "A full disk, an unread pipe as its log",
        stuck_stderr_of_instance,
        is_short=False,
        at_least_s=60.0,
    ),
)
