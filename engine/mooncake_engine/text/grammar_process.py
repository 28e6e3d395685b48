"""Compiles untrusted grammars in a child process with resource limits, before the server does.

The compiler is native code: a thread that runs it can't be stopped, and a grammar that overflows
its stack or memory kills the process. A client's grammar is therefore compiled first in a child
process, which the kernel kills if it exceeds its limits of CPU time and memory. A grammar that
stays within the limits is compiled a second time where it is used, at the same cost.
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
"""The child's stack size: half of that of the threads that compile the grammar again."""
_MAX_REJECTIONS = 1024
"""Rejected grammars that are remembered, by hash: sending one again costs no compilation."""
_OUTSIDE_SIGNALS = (signal.SIGKILL, signal.SIGTERM)
"""Signals that the child's limits do not send: somebody else did, such as the kernel of a host that
is out of memory."""
_MAX_DEATHS = 3
"""Deaths of the child that may have been the machine's doing before a grammar is taken for the
cause."""


@dataclass(frozen=True, slots=True)
class CompileLimits:
    """Resource limits for compiling one grammar.

    Args:
        cpu_s: CPU time in seconds; an integer, as the kernel's limit is.
        wall_s: wall-clock time in seconds, which bounds the wait on a busy machine.
        start_s: seconds until the child has started and read the vocabulary.
        memory_bytes: address space in addition to that of the child with its vocabulary.
    """

    cpu_s: int = 1
    wall_s: float = 10.0
    start_s: float = 60.0
    memory_bytes: int = 512 << 20


class GrammarProcess:
    """The child process, as its parent sees it. It starts with the first grammar, and again after a
    grammar has killed it. Calls block and are serialised, so that they must not run on the event
    loop.

    Args:
        table: the vocabulary.
        limits: the resource limits for each grammar.
    """

    def __init__(self, table: TokenTable, limits: CompileLimits = CompileLimits()) -> None:
        self._setup = msgspec.msgpack.encode((table, limits))
        self._limits = limits
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._rejections: OrderedDict[bytes, str] = OrderedDict()
        self._deaths: OrderedDict[bytes, int] = OrderedDict()  # those that prove nothing yet

    def check(self, grammar: Grammar) -> None:
        """Compile a grammar in the child process.

        Raises:
            InvalidRequest: the grammar is invalid, or compiling it exceeds the limits.
            RequestFailed: the child process can't be started at the moment, or was killed from
                outside.
        """
        key = hashlib.sha256(f"{grammar.kind.name}:{grammar.source}".encode()).digest()
        with self._lock:
            reason = self._rejections.get(key)
            if reason is None:
                reason = self._compile(grammar, key)
        if reason:
            raise InvalidRequest(reason, param=PARAM)

    def close(self) -> None:
        """Kill the child process; a later call starts another."""
        with self._lock:
            self._end()

    def _compile(self, grammar: Grammar, key: bytes) -> str:
        """Compile a grammar; returns the reason for its rejection, or an empty string.

        Raises:
            RequestFailed: see ``check``.
        """
        child = self._child
        if child is None or child.poll() is not None:
            child = self._start()
        reply = self._exchange(child, grammar, self._limits.wall_s)
        if reply is not None:
            self._deaths.pop(key, None)
            return self._reject(key, reply.decode()) if reply else ""
        is_late = not _has_exited(child)
        status = self._end()
        what = grammar.kind.value
        logger.warning("compiling a %s killed the compiler: %s", what, status)
        reason = (
            f"the {what} is rejected: compiling it takes more than {self._limits.cpu_s} s, or more "
            f"memory or nesting than allowed ({status})"
        )
        is_from_outside = -child.returncode in _OUTSIDE_SIGNALS
        if not is_from_outside or self._count_death(key) >= _MAX_DEATHS:
            return self._reject(key, reason)
        if is_late:  # by wall-clock time, which also passes on a machine that is busy with others
            return reason
        raise RequestFailed(
            f"the process that compiles grammars was killed from outside ({status}), perhaps "
            "because the host is out of memory: send the request again"
        )

    def _reject(self, key: bytes, reason: str) -> str:
        self._rejections[key] = reason
        if len(self._rejections) > _MAX_REJECTIONS:
            self._rejections.popitem(last=False)
        return reason

    def _count_death(self, key: bytes) -> int:
        num_deaths = self._deaths.pop(key, 0) + 1
        self._deaths[key] = num_deaths
        if len(self._deaths) > _MAX_REJECTIONS:
            self._deaths.popitem(last=False)
        return num_deaths

    def _start(self) -> subprocess.Popen[bytes]:
        self._end()
        command = [sys.executable, "-m", "mooncake_engine.text.grammar_process"]
        try:
            child = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # keeps Ctrl-C from reaching the child
            )
        except OSError as exc:
            raise RequestFailed(f"can't start a process to compile grammars in: {exc}") from exc
        self._child = child
        if self._exchange(child, self._setup, self._limits.start_s) is None:
            _has_exited(child)
            raise RequestFailed(f"the grammar compiler's process did not start: {self._end()}")
        return child

    @staticmethod
    def _exchange(
        child: subprocess.Popen[bytes], payload: bytes | Grammar, within_s: float
    ) -> bytes | None:
        """Send a frame and wait for the reply; None if there is none within the time."""
        assert child.stdin is not None
        assert child.stdout is not None
        body = payload if isinstance(payload, bytes) else msgspec.msgpack.encode(payload)
        deadline = time.monotonic() + within_s
        try:
            _write_until(child.stdin.fileno(), _framed(body), deadline)
        except OSError:
            return None
        return _read_frame(child.stdout, _Ready(child.stdout.fileno(), select.POLLIN, deadline))

    def _end(self) -> str:
        """Kill the child process; returns the signal or status with which it ended."""
        child, self._child = self._child, None
        if child is None:
            return ""
        child.kill()
        # Closes the pipes and waits. Closing flushes what a child that is gone has not read.
        with contextlib.suppress(OSError), child:
            pass
        code = child.returncode
        return signal.Signals(-code).name if code < 0 else f"status {code}"


def _has_exited(child: subprocess.Popen[bytes]) -> bool:
    """Whether a child that does not reply has ended by itself, with a status that says why; it may
    be about to."""
    try:
        child.wait(0.1)
    except subprocess.TimeoutExpired:
        return False
    return True


class _Ready:
    """Waits until a descriptor is ready; the call returns False if it is not by the deadline.

    Args:
        descriptor: the descriptor. ``poll`` takes any, ``select`` none above 1023.
        event: what it is to be ready for, as ``poll`` has it.
        deadline: a clock reading, in seconds of ``time.monotonic``.
    """

    def __init__(self, descriptor: int, event: int, deadline: float) -> None:
        self._poll = select.poll()
        self._poll.register(descriptor, event)
        self._deadline = deadline

    def __call__(self) -> bool:
        remaining = max(0.0, self._deadline - time.monotonic())
        return bool(self._poll.poll(math.ceil(remaining * 1e3)))


def _write_until(descriptor: int, data: bytes, deadline: float) -> None:
    """Write to a pipe that may not be read.

    Raises:
        OSError: its reader is gone, or has not read everything by the deadline.
    """
    os.set_blocking(descriptor, False)
    ready, rest = _Ready(descriptor, select.POLLOUT, deadline), memoryview(data)
    while rest:
        if not ready():
            raise TimeoutError("the pipe was not read")
        with contextlib.suppress(BlockingIOError):
            rest = rest[os.write(descriptor, rest) :]


def _framed(body: bytes) -> bytes:
    return len(body).to_bytes(_LENGTH_BYTES, "big") + body


def _write_frame(sink: IO[bytes], body: bytes) -> None:
    sink.write(_framed(body))
    sink.flush()


def _read_frame(source: IO[bytes], wait: Callable[[], bool] = lambda: True) -> bytes | None:
    """The next frame; None at the end of the stream, or once ``wait`` returns False."""
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
    """Run the child process: reads the vocabulary and then grammars, and replies to each with its
    error, or with an empty string."""
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
            reply = ""
        except InvalidRequest as exc:
            reply = str(exc)
        _write_frame(sink, reply.encode(errors="replace"))


def _address_space() -> int:
    """The bytes of address space that this process uses."""
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


if __name__ == "__main__":
    main()
