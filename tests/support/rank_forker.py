"""One process with all of the ranks' imports that forks the ranks of all engines of a test process.

An engine starts a child that imports torch and forks its ranks, which takes two to three seconds of
a core. A suite creates hundreds of engines in one process; this child stays alive and forks
processes that are equivalent to such a child.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_STREAMS = (1, 2)
_MAX_DESCRIPTORS = 253  # Linux, SCM_MAX_FD
_MAX_BYTES = 1 << 20


class RankForker:
    """Replaces ``rank_launcher.start_forker``. May be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ours: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def __call__(self, descriptors: Sequence[int]) -> _Forked:
        """Fork a child with these descriptors; it forks the ranks and exits."""
        with self._lock:
            ours = self._ours or self._start()
            where = {"env": dict(os.environ), "cwd": os.getcwd(), "path": sys.path}
            socket.send_fds(ours, [json.dumps(where).encode()], [*_STREAMS, *descriptors])
            return _Forked(int(ours.recv(16)))

    def close(self) -> None:
        """Stop the forking process. Idempotent."""
        if self._ours is not None and self._process is not None:
            self._ours.close()
            self._process.wait()
            self._ours = self._process = None

    def _start(self) -> socket.socket:
        self._ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _MAX_BYTES)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, str(Path(__file__)), str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                stdin=subprocess.DEVNULL,
            )
        return self._ours


class _Forked:
    """The handle that ``start_rank_processes`` expects of a child that has already exited.

    Args:
        status: its exit status.
    """

    def __init__(self, status: int) -> None:
        self._status = status

    def wait(self) -> int:
        """The child's exit status."""
        return self._status


def main(descriptor: int) -> int:
    """Fork children until the requesting process closes its end."""
    from mooncake_engine.execution import rank_process

    with socket.socket(fileno=descriptor) as asked:
        while True:
            where, descriptors, _, _ = socket.recv_fds(asked, _MAX_BYTES, _MAX_DESCRIPTORS)
            if not where:
                return 0
            if (pid := os.fork()) == 0:
                asked.close()
                _be_where(json.loads(where), descriptors[: len(_STREAMS)])
                return rank_process.main(list(map(str, descriptors[len(_STREAMS) :])))
            for each in descriptors:
                os.close(each)
            _, status = os.waitpid(pid, 0)
            asked.send(str(os.waitstatus_to_exitcode(status)).encode())


def _be_where(place: dict[str, Any], streams: Sequence[int]) -> None:
    """Take on the requesting process' environment, folder, import path and output streams."""
    os.environ.clear()
    os.environ.update(place["env"])
    os.chdir(place["cwd"])
    sys.path[:] = place["path"]
    for stream, number in zip(streams, _STREAMS, strict=True):
        os.dup2(stream, number)
        os.close(stream)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
