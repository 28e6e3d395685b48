"""The peer process of the transport suite: ``python -m mooncake_hal.testing.transports_peer``.

It exchanges JSON lines on stdin and stdout. The first line it reads has the options of its
endpoint; its first reply has the endpoint's address. Then it reads one command per line and replies
to each, until stdin is closed.
"""

from __future__ import annotations

import hashlib
import json
import os
import resource
import signal
import subprocess
import sys
from dataclasses import asdict
from functools import cached_property
from types import TracebackType
from typing import Any

import numpy as np

from mooncake_hal.errors import TransferError
from mooncake_hal.testing.transports_buffers import Buffer, load_transport, resolve
from mooncake_hal.transport import Endpoint, EndpointOptions, MemoryRegion, Spans

START_SECONDS = 60.0


class PeerProcess:
    """A child process with one endpoint and one registered buffer.

    It starts in the background: whatever needs it first waits for it, so that several start at
    once, and while their caller prepares its own end.

    Args:
        loader: ``"package.module:callable"`` that returns the transport.
        allocator: ``"package.module:callable"`` that takes a size and returns a Buffer.
        options: the options of its endpoint.
        nbytes: size of its buffer in bytes.
        seed: seed of the buffer's content; see ``content``.
    """

    def __init__(
        self, loader: str, allocator: str, options: EndpointOptions, nbytes: int, seed: int = 1
    ) -> None:
        self._nbytes = nbytes
        self._process = subprocess.Popen(
            [sys.executable, "-m", "mooncake_hal.testing.transports_peer"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            # the child must find loader and allocator in the same places as this process
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        plain = {**asdict(options), "secret": options.secret.hex()}
        self._send(
            {
                "loader": loader,
                "allocator": allocator,
                "options": plain,
                "nbytes": nbytes,
                "seed": seed,
            }
        )

    @cached_property
    def _opened(self) -> dict[str, Any]:
        return self._reply()

    @property
    def address(self) -> bytes:
        """Address of its endpoint."""
        return bytes.fromhex(self._opened["address"])

    @property
    def region(self) -> MemoryRegion:
        """Its registered buffer."""
        return MemoryRegion(self._opened["base"], self._nbytes)

    @property
    def pid(self) -> int:
        """Process id of the child."""
        return self._process.pid

    def ask(self, **command: Any) -> dict[str, Any]:
        """Send a command and return its reply."""
        self.tell(**command)
        return self._reply()

    def tell(self, **command: Any) -> None:
        """Send a command without reading its reply."""
        _ = self._opened  # its reply comes before the command's
        self._send(command)

    def _send(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message) + "\n")
        self._process.stdin.flush()

    def _reply(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the peer process ended with {self._process.wait()}")
        reply: dict[str, Any] = json.loads(line)
        return reply

    def kill(self) -> None:
        """End the child with SIGKILL and reap it."""
        self._process.kill()
        self._process.wait()

    def signal(self, number: int) -> None:
        """Send the child a signal once it is up; after SIGSTOP, waits until it is stopped."""
        _ = self._opened
        self._process.send_signal(number)
        if number == signal.SIGSTOP:
            os.waitid(os.P_PID, self._process.pid, os.WSTOPPED)

    def close(self) -> None:
        """Let the child close its endpoint and exit. Idempotent."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        if self._process.poll() is None:
            self._process.stdin.close()
            try:
                self._process.wait(START_SECONDS)
            except subprocess.TimeoutExpired:
                self.kill()
        self._process.stdin.close()
        self._process.stdout.close()

    def __enter__(self) -> PeerProcess:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class _Child:
    """The child's side: an endpoint, a buffer, and a method per command."""

    def __init__(self, first: dict[str, Any]) -> None:
        options = first["options"]
        options["secret"] = bytes.fromhex(options["secret"])
        self.buffer: Buffer = resolve(first["allocator"])(first["nbytes"])
        self.buffer.put(content(first["seed"], first["nbytes"]))
        transport = load_transport(first["loader"])
        self.endpoint: Endpoint = transport.open(EndpointOptions(**options))
        self.key = self.endpoint.register(self.buffer.region)

    def opened(self) -> dict[str, Any]:
        return {"address": self.endpoint.address.hex(), "base": self.buffer.region.address}

    def digest(self) -> dict[str, Any]:
        return {"digest": hashlib.sha256(self.buffer.get().tobytes()).hexdigest()}

    def revoke(self) -> dict[str, Any]:
        self.endpoint.revoke(self.key)
        return {}

    def descriptors(self) -> dict[str, Any]:
        return {"count": len(os.listdir("/proc/self/fd"))}

    def cpu(self) -> dict[str, Any]:
        used = resource.getrusage(resource.RUSAGE_SELF)
        return {"seconds": used.ru_utime + used.ru_stime}

    def hammer(self, address: str, base: int, rounds: int) -> dict[str, Any]:
        """Write the whole buffer to a peer repeatedly, and report how that ended."""
        nbytes = self.buffer.region.nbytes
        spans = Spans(
            np.array([self.buffer.region.address], np.uint64),
            np.array([base], np.uint64),
            np.array([nbytes], np.uint64),
        )
        try:
            peer = self.endpoint.connect(bytes.fromhex(address), timeout=START_SECONDS)
            for _ in range(rounds):
                peer.write(spans, timeout=START_SECONDS).wait()
        except TransferError as exc:
            return {"error": type(exc).__name__}
        return {"error": None}


def content(seed: int, nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return the initial content of a buffer with that seed."""
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


def main() -> None:
    """Execute commands from stdin until it is closed."""
    child = _Child(json.loads(sys.stdin.readline()))
    reply = child.opened()
    while True:
        sys.stdout.write(json.dumps(reply) + "\n")
        sys.stdout.flush()
        line = sys.stdin.readline()
        if not line:
            break
        command = json.loads(line)
        reply = getattr(child, command.pop("do"))(**command)
    child.endpoint.close()
    child.buffer.close()


if __name__ == "__main__":
    main()
