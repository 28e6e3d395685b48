"""Every error of mooncake_kv.

KVError
├── KVConfigError          a connector can't be set up as asked
│   └── SideChannelPortInUse
├── ConnectorDead          the only error that ends the engine: see ``Fatal``
├── StoreIOError           the system failed to read or write a store's file
├── InvalidKVParams        a request's ``kv_transfer_params`` are wrong, or contradict its prompt
└── KVTransferError        KV was not transferred; its request is recomputed or fails
    ├── HandshakeRefused   the peer's metadata contradict ours
    │   └── SessionRefused  the process at the peer's address has another secret or version
    ├── LeaseLost          the peer no longer holds the KV that it promised
    ├── PeerGone           that epoch of the peer is certainly dead
    ├── PeerAbsent         the peer is not at its address: dead, or the route has changed
    ├── PeerUnreachable    nothing at its address answers, not even a kernel
    └── BadFrame           a malformed side-channel message
"""

from __future__ import annotations

from enum import Enum


class KVError(Exception):
    """Base of everything that mooncake_kv raises on purpose."""


class KVConfigError(KVError):
    """A connector can't be set up as configured: what was wanted, what was found, what to do."""


class SideChannelPortInUse(KVConfigError):
    """All ports that the side channel may use are taken."""


class Fatal(Enum):
    """The failures of a connector that end its engine.

    Every other failure, even an unexpected one, ends only the request or the peer's session in
    which it occurs. After one of these, requests would wait forever or get wrong tokens.
    """

    IO_LOOP_ENDED = "the thread of its I/O has ended"
    HOUSEKEEPING_ENDED = "the task that watches leases and deadlines has ended"
    RANK_THREAD_ENDED = "a thread that moves KV has ended"
    MEMORY_MAY_CHANGE = "a transfer could not be drained, so that KV blocks may be overwritten"


class ConnectorDead(KVError):
    """A connector can't continue, and neither can its engine.

    Args:
        fatal: the kind of failure.
        cause: the exception that caused it, if any.
    """

    def __init__(self, fatal: Fatal, cause: BaseException | None = None) -> None:
        super().__init__(fatal.value + (f": {cause!r}" if cause else ""))
        self.fatal = fatal


class StoreIOError(KVError):
    """A read or write of a store's file failed; names the file and the system's error."""


class InvalidKVParams(KVError):
    """``kv_transfer_params`` that can't be honoured; names the field, and what was wanted."""


class KVTransferError(KVError):
    """KV was not transferred."""


class HandshakeRefused(KVTransferError):
    """The peer's metadata contradict ours, or no transport connects its ranks with ours; both
    values are in the message."""


class SessionRefused(HandshakeRefused):
    """What listens at a peer's address does not prove our secret, does not accept our proof, or
    speaks another version of the side channel: no message reaches it."""


class LeaseLost(KVTransferError):
    """The peer no longer holds, or never held, the KV that it promised."""


class PeerGone(KVTransferError):
    """That epoch of a peer is certainly dead: none of its processes writes any more."""


class PeerAbsent(KVTransferError):
    """Nothing, or something else, listens at a peer's address. The peer is dead, or something in
    between (a load balancer, address translation) leads elsewhere now; in that case the peer may
    still write until its lease is over."""


class PeerUnreachable(KVTransferError):
    """No packet comes back from a peer's address: its host or the network to it is down."""


class BadFrame(KVTransferError):
    """A payload that is too long, or not a message of the side-channel protocol."""
