"""What an adapter needs of a transfer engine that is not ours.

Engines know neither our deadlines nor how to end what they have begun. So they are given a transfer
in slices, one at a time, and an engine that fails or does not finish one is closed: only then is it
certain that it touches no more memory.
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
    """As much of a transfer as an engine is given at once.

    Args:
        is_read: whether the bytes come to this process, or leave it.
        spans: the pieces.
        local_keys: [n] int64, which of our regions each piece lies in.
        remote_keys: [n] int64, which of the peer's.
    """

    is_read: bool
    spans: Spans
    local_keys: NDArray[np.int64]
    remote_keys: NDArray[np.int64]


class Agent(Protocol):
    """One running instance of an engine; no two of its methods are called at once.

    An endpoint has one that serves its peers, and one per peer that it drives.
    """

    def description(self) -> bytes:
        """Return what another agent has to know to reach this one. Not empty."""
        ...

    def register(self, key: int, region: MemoryRegion) -> bytes:
        """Register memory; return what another agent has to know of it. Not empty.

        Raises:
            TransportUnavailable: the engine can't take this memory.
        """
        ...

    def deregister(self, key: int) -> None:
        """Withdraw memory that was registered."""
        ...

    def meet(self, description: bytes) -> None:
        """Get to know the one agent that this one moves bytes to and from.

        Raises:
            TransferError: the engine can't reach it.
        """
        ...

    def learn(self, key: int, attachment: bytes) -> None:
        """Get to know a region of that agent, by what its ``register`` returned.

        Raises:
            TransferError: the engine can't use it.
        """
        ...

    def move(self, part: Slice, must_stop: Callable[[], bool]) -> None:
        """Move a slice whole; the bytes have arrived when this returns.

        Args:
            part: pieces in regions that are registered here, and learnt.
            must_stop: says when it is not waited for any more; the agent may go on for a second or
                two, if it can't stop.

        Raises:
            TransferError: not all of it was moved. More of it may be, until the agent is closed.
        """
        ...

    def close(self) -> None:
        """End the engine: nothing moves any more when this returns. Idempotent."""
        ...


class Workspace(Protocol):
    """A little memory of a kind that the engine moves bytes to and from."""

    @property
    def address(self) -> int:
        """Its first byte."""
        ...

    def put(self, content: bytes) -> None:
        """Overwrite it."""
        ...

    def get(self) -> bytes:
        """Return what is in it."""
        ...


class HostWorkspace:
    """Workspace in host memory.

    Args:
        nbytes: size; zero at first.
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
    """Does here what a peer's agents ask for; no two of its methods are called at once."""

    def handle_request(self, session: Session, payload: bytes, local: AttachedRegions) -> bytes:
        """Answer a call.

        Args:
            session: the peer's.
            payload: what it asks, in the engine's own encoding.
            local: our regions; none is withdrawn before this returns.

        Raises:
            TransferError: it can't be done; the peer gets the reason.
        """
        ...

    def session_ended(self, session: Session) -> None:
        """That peer is gone: free what was held for it."""
        ...


@dataclass(frozen=True, slots=True)
class AdaptedEngine:
    """An engine, as one endpoint uses it.

    Args:
        name: of the transport.
        protocol: what the engine speaks; both ends must speak the same.
        open_agent: starts an agent: that which drives a session's peer; with None, that which
            serves peers. Raises TransportUnavailable.
        max_pieces: pieces in a slice.
        max_bytes: bytes in a slice, roughly; bounds how long a cancelled transfer drains.
        location: where it stands, for those that not every peer reaches; see ``EngineInfo``.
        workspace: allocates a few bytes that it can reach, by which two engines prove themselves.
            What is dropped is free again.
        workspace_device: the device of that memory.
        request_handler: does what the agents of peers ask for; None if they ask nothing.
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
        """Describe such memory as what agents register."""
        return MemoryRegion(workspace.address, nbytes, self.workspace_device)

    def cut(self, spans: Spans) -> list[Spans]:
        """Cut the spans of a transfer into those of its slices; none is empty."""
        shares = split_spans(spans, -(-spans.total_bytes // self.max_bytes))
        return [run for share in shares for run in limit_spans(share, self.max_pieces)]
