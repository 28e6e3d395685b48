"""The interface that an adapter requires of a third-party transfer engine.

Engines know nothing of our deadlines and can't cancel a transfer. So they are given transfers in
slices, one at a time, and an engine that fails to finish a slice is closed: only then is it certain
that it accesses no more memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from mooncake_hal.session.regions import AttachedRegions
from mooncake_hal.session.session import Session
from mooncake_hal.transport import MemoryRegion, Spans
from mooncake_hal.transports.spans import limit_spans, split_spans


@dataclass(frozen=True, slots=True, eq=False)
class Slice:
    """The part of a transfer that an engine moves in one call.

    Args:
        is_read: whether the bytes are read from the peer or written to it.
        spans: the n pieces.
        local_keys: [n] int64, key of our region that each piece is in.
        remote_keys: [n] int64, key of the peer's region that each piece is in.
    """

    is_read: bool
    spans: Spans
    local_keys: NDArray[np.int64]
    remote_keys: NDArray[np.int64]


class Agent(Protocol):
    """One running instance of an engine; its methods are never called concurrently.

    An endpoint has one agent that serves its peers, and one for each peer that it connects to.
    """

    def description(self) -> bytes:
        """Return the description with which another agent can reach this one. Not empty."""
        ...

    def register(self, key: int, region: MemoryRegion) -> bytes:
        """Register memory; returns its attachment, with which another agent can access it. Not
        empty.

        Raises:
            TransportUnavailable: the engine can't register this memory.
        """
        ...

    def deregister(self, key: int) -> None:
        """Deregister memory."""
        ...

    def meet(self, description: bytes) -> None:
        """Set the only agent to and from which this one moves bytes.

        Raises:
            TransferError: the engine can't reach it.
        """
        ...

    def learn(self, key: int, attachment: bytes) -> None:
        """Add a region of that agent, with the attachment that its ``register`` returned.

        Raises:
            TransferError: the engine can't use it.
        """
        ...

    def move(self, part: Slice, must_stop: Callable[[], bool]) -> None:
        """Move a whole slice; the bytes have arrived when this returns.

        Args:
            part: pieces in regions that were passed to ``register`` and ``learn``.
            must_stop: returns True once the transfer is not wanted any more; an agent that can't
                stop may continue for a second or two.

        Raises:
            TransferError: not all bytes were moved. More may be moved until the agent is closed.
        """
        ...

    def close(self) -> None:
        """Shut the engine down: no more bytes move once this returns. Idempotent."""
        ...


class Workspace(Protocol):
    """A small buffer in memory that the engine can access."""

    @property
    def address(self) -> int:
        """Address of the first byte."""
        ...

    def put(self, content: bytes) -> None:
        """Overwrite the buffer."""
        ...

    def get(self) -> bytes:
        """Return the buffer's content."""
        ...


class HostWorkspace:
    """Workspace in host memory.

    Args:
        nbytes: size in bytes; the memory is zeroed.
    """

    def __init__(self, nbytes: int) -> None:
        self._bytes = np.zeros(nbytes, np.uint8)

    @property
    def address(self) -> int:
        return self._bytes.ctypes.data

    def put(self, content: bytes) -> None:
        self._bytes[:] = np.frombuffer(content, np.uint8)

    def get(self) -> bytes:
        return self._bytes.tobytes()


class PeerRequestHandler(Protocol):
    """Handles requests of peers' agents; its methods are never called concurrently."""

    def handle_request(self, session: Session, payload: bytes, local: AttachedRegions) -> bytes:
        """Handle a request and return the reply.

        Args:
            session: the peer's session.
            payload: the request in the engine's own encoding.
            local: our regions; none is revoked before this returns.

        Raises:
            TransferError: the request is rejected; the peer receives the message.
        """
        ...

    def session_ended(self, session: Session) -> None:
        """Called when the peer is gone: release any resources held for it."""
        ...


@dataclass(frozen=True, slots=True)
class AdaptedEngine:
    """The configuration of an engine for one endpoint.

    Args:
        name: name of the transport.
        protocol: the engine's protocol, which must be the same on both ends.
        open_agent: opens the agent that drives a session's peer; with None, the agent that serves
            peers. Raises TransportUnavailable.
        max_pieces: maximum number of pieces in a slice.
        max_bytes: approximate maximum of bytes in a slice; bounds how long a cancelled transfer
            drains.
        location: the engine's location, if not every peer can reach it; see ``AdapterInfo``.
        workspace: allocates a few bytes that the engine can access, with which two engines check
            that they reach each other. The memory is freed with the returned object.
        workspace_device: the device of that memory.
        request_handler: handles requests of peers' agents; None if they send none.
    """

    name: str
    protocol: str
    open_agent: Callable[[Session | None], Agent]
    max_pieces: int
    max_bytes: int = 16 << 20
    location: bytes = b""
    workspace: Callable[[int], Workspace] = HostWorkspace
    workspace_device: str = "cpu"
    request_handler: PeerRequestHandler | None = None

    def workspace_region(self, workspace: Workspace, nbytes: int) -> MemoryRegion:
        """Return a workspace's memory as a region for ``Agent.register``."""
        return MemoryRegion(workspace.address, nbytes, self.workspace_device)

    def cut(self, spans: Spans) -> list[Spans]:
        """Divide a transfer's spans into slices; none is empty."""
        shares = split_spans(spans, -(-spans.total_bytes // self.max_bytes))
        return [run for share in shares for run in limit_spans(share, self.max_pieces)]
