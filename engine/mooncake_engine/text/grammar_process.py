"""Tries grammars out in a process of its own, which the kernel ends when one costs too much.

Compiling a grammar is native code: a thread that runs it can't be stopped, and a grammar that
overflows the compiler's stack or memory ends the process that it runs in. So what a client sends is
compiled in a child first, which may use so much processor time and memory and no more. A grammar
that keeps to that is compiled again where it is used, at the same cost.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
import os
import resource
import select
import signal
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO

import msgspec

from mooncake_engine.errors import InvalidRequest, RequestFailed
from mooncake_engine.sampling_params import Grammar
from mooncake_engine.text.grammar_compiler import PARAM, GrammarCompiler, TokenTable

logger = logging.getLogger(__name__)

_LENGTH_BYTES = 4
_STACK_BYTES = 4 << 20
"""Half of what the threads have that compile the grammar again."""
_NUM_REMEMBERED = 1024
"""Hashes of refused grammars: who sends one again and again costs nothing more."""


@dataclass(frozen=True, slots=True)
class CompileLimits:
    """What compiling one grammar may cost.

    Args:
        cpu_s: seconds of processor time, in whole ones: the kernel counts those.
        wall_s: seconds in all, however busy the machine is.
        start_s: seconds until the child has read the vocabulary.
        memory_bytes: address space beyond that of the vocabulary.
    """

    cpu_s: int = 1
    wall_s: float = 10.0
    start_s: float = 60.0
    memory_bytes: int = 512 << 20


class GrammarProcess:
    """The child, started at the first grammar and again after each that ended it. Calls wait for
    one another, so they belong on a thread.

    Args:
        table: the vocabulary.
        limits: what a grammar may cost.
    """

    def __init__(self, table: TokenTable, limits: CompileLimits = CompileLimits()) -> None:
        self._setup = msgspec.msgpack.encode((table, limits))
        self._limits = limits
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._refused: OrderedDict[bytes, str] = OrderedDict()

    def check(self, grammar: Grammar) -> None:
        """Compile a grammar there.

        Raises:
            InvalidRequest: it is wrong, or costs too much.
            RequestFailed: there can be no child now.
        """
        key = hashlib.sha256(f"{grammar.kind.name}:{grammar.source}".encode()).digest()
        with self._lock:
            reason = self._refused.get(key)
            if reason is None:
                reason = self._try(grammar)
                if reason:
                    self._refused[key] = reason
                    if len(self._refused) > _NUM_REMEMBERED:
                        self._refused.popitem(last=False)
        if reason:
            raise InvalidRequest(reason, param=PARAM)

    def close(self) -> None:
        """End the child; a later call starts another."""
        with self._lock:
            self._end()

    def _try(self, grammar: Grammar) -> str:
        """Why a grammar is refused; empty if it is not."""
        child = self._child
        if child is None or child.poll() is not None:
            child = self._start()
        words = self._ask(child, grammar, self._limits.wall_s)
        if words is not None:
            return words.decode()
        status = self._end()
        logger.warning("a %s ended its compiler: %s", grammar.kind.value, status)
        return (
            f"the {grammar.kind.value} is refused: compiling it takes more than "
            f"{self._limits.cpu_s} s, or more memory or nesting than is allowed ({status})"
        )

    def _start(self) -> subprocess.Popen[bytes]:
        self._end()
        command = [sys.executable, "-m", "mooncake_engine.text.grammar_process"]
        try:
            child = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is our business
            )
        except OSError as exc:
            raise RequestFailed(f"can't start a process to compile grammars in: {exc}") from exc
        self._child = child
        if self._ask(child, self._setup, self._limits.start_s) is None:
            raise RequestFailed(f"the process that compiles grammars did not start: {self._end()}")
        return child

    @staticmethod
    def _ask(
        child: subprocess.Popen[bytes], what: bytes | Grammar, within_s: float
    ) -> bytes | None:
        """Send a frame and wait for the reply; None if none comes."""
        assert child.stdin is not None
        assert child.stdout is not None
        body = what if isinstance(what, bytes) else msgspec.msgpack.encode(what)
        try:
            _write_frame(child.stdin, body)
        except OSError:
            return None
        deadline = time.monotonic() + within_s
        descriptor = child.stdout.fileno()

        def wait() -> bool:
            remaining = max(0.0, deadline - time.monotonic())
            return bool(select.select([descriptor], [], [], remaining)[0])

        return _read_frame(child.stdout, wait)

    def _end(self) -> str:
        """End the child; how it ended."""
        child, self._child = self._child, None
        if child is None:
            return ""
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(0.1)  # it may be about to end by itself, and to say why
        child.kill()
        with child:  # closes the pipes and waits
            contextlib.suppress(OSError)
        code = child.returncode
        return signal.Signals(-code).name if code < 0 else f"status {code}"


def _write_frame(sink: IO[bytes], body: bytes) -> None:
    sink.write(len(body).to_bytes(_LENGTH_BYTES, "big") + body)
    sink.flush()


def _read_frame(source: IO[bytes], wait: Callable[[], bool] = lambda: True) -> bytes | None:
    """The next frame; None at the end, or when ``wait`` says that it does not come."""
    head = _read(source, _LENGTH_BYTES, wait)
    return None if head is None else _read(source, int.from_bytes(head, "big"), wait)


def _read(source: IO[bytes], count: int, wait: Callable[[], bool]) -> bytes | None:
    found = b""
    while len(found) < count:
        piece = os.read(source.fileno(), count - len(found)) if wait() else b""
        if not piece:
            return None
        found += piece
    return found


def main() -> None:
    """The child: reads the vocabulary, then grammars, and replies with what is wrong with each."""
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    setup = _read_frame(source)
    if setup is None:
        return
    table, limits = msgspec.msgpack.decode(setup, type=tuple[TokenTable, CompileLimits])
    compiler = GrammarCompiler(table)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_STACK, (_STACK_BYTES, _STACK_BYTES))
    limit = _address_space() + limits.memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    _write_frame(sink, b"")
    while (body := _read_frame(source)) is not None:
        used = math.ceil(time.process_time())
        hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
        resource.setrlimit(resource.RLIMIT_CPU, (used + limits.cpu_s, hard))
        try:
            compiler.compile(msgspec.msgpack.decode(body, type=Grammar))
            words = ""
        except InvalidRequest as exc:
            words = str(exc)
        _write_frame(sink, words.encode(errors="replace"))


def _address_space() -> int:
    """Bytes of address space that this process has."""
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


if __name__ == "__main__":
    main()
