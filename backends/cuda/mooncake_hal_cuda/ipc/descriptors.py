"""Passes a descriptor to another process of this host.

By SCM_RIGHTS over an abstract socket: whoever shares the network namespace can be reached, whatever
its user, its process namespace or its file system is. ``pidfd_getfd`` would need the right to trace
the other process, and its number over here: containers have neither. The receiver listens for one
message and is told to whom the descriptor goes over the connection that has proved itself, so the
sender needs no thread; a token from there shows that the message is the one that was asked for.
"""

from __future__ import annotations

import hmac
import os
import secrets
import socket
import time

from mooncake_hal.errors import PeerLost, TransferTimeout

TOKEN_BYTES = 32
SEND_SECONDS = 5.0


class Mailbox:
    """Takes one descriptor; close it."""

    def __init__(self) -> None:
        self.name = f"mooncake-hal-cuda-{secrets.token_hex(16)}"
        self.token = secrets.token_bytes(TOKEN_BYTES)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        self._listener.bind(f"\0{self.name}")
        self._listener.listen(8)

    def receive(self, timeout: float) -> int:
        """The descriptor; the caller closes it.

        Raises:
            TransferTimeout: none came.
        """
        deadline = time.monotonic() + timeout
        while (left := deadline - time.monotonic()) > 0:
            self._listener.settimeout(left)
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                break
            with connection:
                connection.settimeout(left)
                if (descriptor := self._read(connection)) is not None:
                    return descriptor
        raise TransferTimeout(f"no descriptor of the peer's memory came within {timeout:.3g} s")

    def close(self) -> None:
        """Take no more."""
        self._listener.close()

    def _read(self, connection: socket.socket) -> int | None:
        """What came, or None if it is not what was asked for: anybody may knock here."""
        try:
            token, found, _, _ = socket.recv_fds(
                connection, TOKEN_BYTES + 1, 1, socket.MSG_CMSG_CLOEXEC
            )
        except OSError:
            return None
        if len(found) == 1 and hmac.compare_digest(token, self.token):
            return found[0]
        for descriptor in found:
            os.close(descriptor)
        return None


def send_descriptor(name: str, token: bytes, descriptor: int) -> None:
    """Put a descriptor into a mailbox; it stays open here.

    Raises:
        PeerLost: nobody takes it.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC) as sender:
        sender.settimeout(SEND_SECONDS)
        try:
            sender.connect(f"\0{name}")
            socket.send_fds(sender, [token], [descriptor])
        except OSError as exc:
            raise PeerLost(f"the peer does not take a descriptor of our memory: {exc}") from exc
