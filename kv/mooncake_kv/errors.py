"""Every error of mooncake_kv.

KVError
├── KVConfigError          a connector can't be set up as asked
│   └── SideChannelPortTaken
├── ConnectorDead          what ends the engine, and nothing else does: see ``Fatal``
├── StoreIOError           the system refused to read or write a store's file
├── InvalidKVParams        a request's ``kv_transfer_params`` are wrong, or contradict its prompt
└── KVTransferError        KV did not come across; the request says what happens next
    ├── HandshakeRefused   the peer's metadata contradict ours
    ├── LeaseLost          the peer no longer holds the KV that it promised
    ├── PeerGone           that epoch of the peer is dead for certain
    ├── PeerAbsent         it is not at its address: dead, or the way there has changed
    ├── PeerUnreachable    nothing at its address answers, not even a kernel
    └── BadFrame           a side-channel message that can't be honoured
"""

from __future__ import annotations

from enum import Enum


class KVError(Exception):
    """Base of everything that mooncake_kv raises on purpose."""


class KVConfigError(KVError):
    """A connector can't be set up as asked: what was wanted, what was found, what to do."""


class SideChannelPortTaken(KVConfigError):
    """All ports that the side channel may have are in use."""


class Fatal(Enum):
    """Everything of a connector that ends its engine.

    What else goes wrong, also what nobody thought of, ends the request or the session with the peer
    that it came up in: requests would wait for ever, or get wrong tokens, only after these.
    """

    IO_LOOP_ENDED = "the thread of its I/O has ended"
    HOUSEKEEPING_ENDED = "the task that watches leases and deadlines has ended"
    RANK_THREAD_ENDED = "a thread that moves KV has ended"
    MEMORY_MAY_CHANGE = "a transfer could not be drained, so that KV blocks may be overwritten"


class ConnectorDead(KVError):
    """A connector that can't go on, and its engine with it.

    Args:
        fatal: why.
        cause: what was raised.
    """

    def __init__(self, fatal: Fatal, cause: BaseException | None = None) -> None:
        super().__init__(fatal.value + (f": {cause!r}" if cause else ""))
        self.fatal = fatal


class StoreIOError(KVError):
    """A read or write of a store's file failed: which, and what the system said."""


class InvalidKVParams(KVError):
    """``kv_transfer_params`` that can't be honoured; says which field, and what was wanted."""


class KVTransferError(KVError):
    """KV did not come across."""


class HandshakeRefused(KVTransferError):
    """The peer's metadata contradict ours; both values are in the message."""


class LeaseLost(KVTransferError):
    """The peer no longer holds, or never held, the KV that it promised."""


class PeerGone(KVTransferError):
    """That epoch of a peer is dead for certain: nothing of it writes any more."""


class PeerAbsent(KVTransferError):
    """Nobody listens at a peer's address, or somebody else does: it is dead, or what stands between
    (a load balancer, an address that was translated) leads elsewhere now, and it may still write
    until its lease is over."""


class PeerUnreachable(KVTransferError):
    """No packet comes back from a peer's address: its host is down or gone, or the way there is."""


class BadFrame(KVTransferError):
    """A payload that is too long, or not a message of ours."""
