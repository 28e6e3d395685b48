"""The connector interface that the engine calls, and the lookup of a connector by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Protocol, cast

import msgspec

from mooncake_hal.deployment import CONNECTOR_GROUP
from mooncake_hal.specs import TransportConstraints
from mooncake_kv.config import KVTransferConfig
from mooncake_kv.connector_worker import ConnectorWorker, RankContext
from mooncake_kv.errors import KVConfigError
from mooncake_kv.handshake import InstanceMetadata
from mooncake_kv.params import FirstToken, KVTransferDict, KVTransferParams, TransferMode
from mooncake_kv.ranks import SendToRank


@dataclass(frozen=True, slots=True)
class LoadEnded:
    """A load completed or failed; the KV is complete if ``error`` is None.

    Args:
        request_id: the request that was loaded.
        error: the reason of the failure, or None.
        first_token: the token that the peer sampled, if it arrived with the KV.
        is_drained: False if the blocks may still be written; a second LoadEnded follows once they
            can't.
    """

    request_id: str
    error: str | None
    first_token: FirstToken | None = None
    is_drained: bool = True


@dataclass(frozen=True, slots=True)
class LeaseEnded:
    """A finished prefill's blocks are no longer held for a peer: the engine may free them."""

    request_id: str


@dataclass(frozen=True, slots=True)
class SendRefused:
    """The instance that waits for a prompt's KV refuses this one, so that nobody can read what is
    computed for it. An engine that fails the request at once lets the proxy end that wait.

    Args:
        request_id: the request that computes the prompt.
        error: the reason, for whoever sent it.
    """

    request_id: str
    error: str


REFUSED = "the decode instance that waits for its KV refuses this instance; its log says why"
"""``SendRefused.error``. Clients may see it, so it names no address."""


@dataclass(frozen=True, slots=True)
class ConnectorFailed:
    """A background task of the connector died, which ends the engine too."""

    cause: BaseException


TRANSFER_GAUGES = ("leases_held", "reservations")
"""The names of ``Connector.stats`` that are gauges; the others are counters."""
TRANSFER_STATS_HELP: Mapping[str, str] = {
    "leases_held": "Prompts whose blocks are held now: with pull finished ones until a peer has "
    "read them, with push from their start until a peer has all of them.",
    "leases_expired": "Leases that ended because the peer neither read the KV nor renewed the "
    "lease in time.",
    "reservations": "Requests whose blocks are reserved now for KV that a peer is computing or "
    "writing.",
    "loads": "Loads of a prompt's KV from a peer that were started.",
    "load_failures": "Loads that failed, also those whose KV the peer lost before they were "
    "started: their requests compute the prompt themselves, or fail, as configured.",
    "refused_loads": "Failed loads whose peer can't exchange KV with this instance; the log says "
    "why.",
    "load_seconds": "Seconds of loads: of reading with pull, from the reservation to the last byte "
    "with push; summed over loads, which may overlap.",
    "bytes_received": "Bytes of KV received from peers, summed over this instance's ranks.",
    "bytes_received_early": "Bytes of KV, of those received, that were read while the peer was "
    "still computing the prompt.",
    "pushes": "Pushes of a prompt's KV to a peer that were started.",
    "push_failures": "Pushes that failed: the peer computes the prompt, or fails the request.",
    "push_seconds": "Seconds that the slowest rank of each successful push wrote, summed over "
    "pushes, which may overlap.",
    "bytes_sent": "Bytes of KV written to peers by pushes that succeeded, summed over this "
    "instance's ranks.",
    "refused_peers": "Peers that can't exchange KV with this instance, each start of them counted "
    "once; the log says why.",
    "peers_with_different_rounding": "Peers whose KV is rounded differently, each start of them "
    "counted once; the log says how.",
}
"""What the names of ``Connector.stats`` count, in which unit: the help texts of their metrics."""

Event = LoadEnded | LeaseEnded | SendRefused | ConnectorFailed
PostEvent = Callable[[Event], None]
"""Receives the connector's events, on any thread; must not block."""


HasStalled = Callable[[], bool]
"""Returns whether the engine has stopped stepping, so that KV that peers hold for it won't be read
soon. Called on any thread."""


def never_stalls() -> bool:
    """The ``HasStalled`` of an engine without a step watchdog."""
    return False


class RankEndpointInfo(msgspec.Struct, frozen=True):
    """A rank's address for each transport, by the transport's name."""

    endpoints: dict[str, bytes]


class Topology(msgspec.Struct, frozen=True, kw_only=True):
    """What an instance publishes to proxies and peers that want to reach it.

    Args:
        engine_id: name of this epoch.
        host, port: address of the side channel.
        tp_size, pp_size: number of ranks per pipeline stage, and number of stages.
        block_size: tokens per block.
        backend, generation: the hardware that it runs on.
        ranks: endpoints of all ranks, stage after stage.
        transports: transports that are open on all ranks, with the constraints of each.
        must_match: properties that must be equal on two instances that exchange KV, by name.
        pulls_early: whether its KV can be pulled into reserved blocks while it is being computed.
        rounding: how its KV is rounded, by name; may differ between peers.
        splits_choices: whether several choices of one prompt are served from one reservation.
        dp_size: number of data-parallel ranks. Each has its own side channel; this topology
            describes the first.
        secret_digests: see ``mooncake_hal.session.authentication.secret_digests``.
    """

    engine_id: str
    host: str
    port: int
    tp_size: int
    pp_size: int
    block_size: int
    backend: str
    generation: str
    ranks: tuple[RankEndpointInfo, ...]
    transports: dict[str, TransportConstraints]
    must_match: dict[str, str] = {}
    pulls_early: bool = False
    rounding: dict[str, str] = {}
    splits_choices: bool = True
    dp_size: int = 1
    secret_digests: tuple[str, ...] = ()


class CompatibilityReport(msgspec.Struct, frozen=True):
    """Peers that this instance can't exchange KV with, and the KV that it received from others;
    proxies use it to choose pairs of instances.

    Args:
        engine_id: name of this epoch.
        refused_peers: epochs whose handshake with this instance was refused.
        bytes_received: bytes of KV by the epoch that sent them, for the most recent senders.
    """

    engine_id: str
    refused_peers: tuple[str, ...]
    bytes_received: dict[str, int] = {}


class Connector(Protocol):
    """The scheduler side of a connector. Calls return immediately; I/O runs on its own thread."""

    def on_rank_message(self, rank: int, message: bytes) -> None:
        """Process a message from a rank's worker, possibly before ``start``. Any thread; returns
        immediately."""
        ...

    def start(
        self,
        instance: InstanceMetadata,
        *,
        send: SendToRank,
        post: PostEvent,
        has_stalled: HasStalled = never_stalls,
    ) -> None:
        """Wait for the ranks, bind the ports and start serving peers.

        Args:
            instance: this instance's metadata; its ``ranks`` and ``host`` are filled in here.
            send: sends a message to a rank's worker.
            post: receives the connector's events, on any thread; must not block.
            has_stalled: keepalives are suspended while it returns True: peers need not hold KV for
                an engine that may never read it.

        Raises:
            SideChannelPortInUse: a port is in use.
            KVConfigError: a rank did not become ready.
        """
        ...

    def stats(self) -> dict[str, float]:
        """Counters and gauges by name, for metrics; see ``TRANSFER_STATS_HELP``."""
        ...

    def compatibility(self) -> CompatibilityReport:
        """The peers that this instance is known not to be able to exchange KV with. Any thread."""
        ...

    def topology(self) -> Topology:
        """This instance's address and properties. Any thread, after ``start``."""
        ...

    def close(self) -> None:
        """Stop, abandoning the loads in flight and the KV that is held. Idempotent."""
        ...

    def on_new_request(self, request_id: str, params: KVTransferParams) -> None:
        """Announce a request that sends or loads KV (``params.mode`` is not NONE).

        On a prefill instance that pushes, its KV may be sent as it is computed. On a decode
        instance that pulls, the connector renews the peer's lease from now on.
        A prefill for blocks that were reserved for another mode is not sent: the instance that has
        reserved them is notified. Nor is KV read that a holder keeps for another mode: the holder
        is notified.
        """
        ...

    def start_load_kv(
        self,
        request_id: str,
        block_ids: Sequence[int],
        prompt_token_ids: Sequence[int],
        num_computed_tokens: int,
        *,
        cache_salt: str = "",
    ) -> None:
        """Load the KV of a prompt's remaining tokens; ``LoadEnded`` always follows.

        If nothing remains to be loaded, the peer is still notified that it may free its blocks.

        Args:
            request_id: a request that ``on_new_request`` announced.
            block_ids: its block table; the blocks may be written until the load is drained.
            prompt_token_ids: the whole prompt.
            num_computed_tokens: number of leading tokens whose KV is already in the blocks.
            cache_salt: the request's cache salt; a part of the prompt's digest.
        """
        ...

    def prefill_advanced(
        self, request_id: str, block_ids: Sequence[int], num_computed_tokens: int, attempt: int
    ) -> None:
        """Report prefill progress of a request whose KV goes to a peer while it is being computed
        (``params.target``).

        Args:
            request_id: the request that is prefilled.
            block_ids: its block table.
            num_computed_tokens: number of leading tokens whose KV is computed.
            attempt: changes whenever the request has lost its blocks since the last report.
        """
        ...

    def request_finished(
        self,
        request_id: str,
        block_ids: Sequence[int],
        prompt_token_ids: Sequence[int],
        first_token: FirstToken,
        *,
        cache_salt: str = "",
        attempt: int = 0,
    ) -> KVTransferDict | None:
        """Complete a prefill for a peer. The engine keeps the blocks until ``LeaseEnded``.

        Args:
            request_id: the request that was prefilled.
            block_ids: its block table.
            prompt_token_ids: the whole prompt.
            first_token: the token that was sampled after the prompt.
            cache_salt: the request's cache salt; a part of the prompt's digest.
            attempt: as in ``prefill_advanced``.

        Returns:
            ``kv_transfer_params`` with which the peer fetches the KV; None if the KV is sent to
            blocks that the peer reserved.
        """
        ...

    def cancel_load(self, request_id: str) -> None:
        """Cancel the load of a request that ended before its KV was complete. Idempotent.

        If the load was started, ``LoadEnded`` follows when it is drained.
        """
        ...

    def cancel_send(self, request_id: str) -> None:
        """Stop holding or sending a prompt's KV; ``LeaseEnded`` follows when its blocks can be
        freed. Idempotent."""
        ...


_METHODS = tuple(name for name in vars(Connector) if not name.startswith("_"))


class ConnectorType(Protocol):
    """The class of a connector, as ``find_connector`` returns it."""

    mode: TransferMode
    """Which side moves the bytes."""
    worker: Callable[[RankContext], ConnectorWorker]
    """The class of its per-rank worker."""

    def __call__(self, config: KVTransferConfig, num_ranks: int) -> Connector:
        """Construct the scheduler side; nothing is opened before ``start``."""
        ...


def find_connector(name: str) -> ConnectorType:
    """Find a connector by its name, which is an entry point of the group CONNECTOR_GROUP, or by
    the import path of its class: ``package.module:Class``.

    Raises:
        KVConfigError: the name is unknown, its module can't be loaded, or it is not a connector.
    """
    known = {point.name: point for point in entry_points(group=CONNECTOR_GROUP)}
    point = known.get(name)
    if point is None and ":" in name:
        point = EntryPoint(name, name, CONNECTOR_GROUP)
    if point is None:
        raise KVConfigError(
            f"KV connector {name!r} is not known; known are {sorted(known)}, or give a class as "
            "package.module:Class"
        )
    try:
        found = point.load()
    except (ImportError, AttributeError, ValueError) as exc:
        raise KVConfigError(
            f"KV connector {name!r} can't be loaded from {point.value}: {exc}"
        ) from exc
    return _checked(name, found)


def _checked(name: str, found: object) -> ConnectorType:
    """Verify the interface now, rather than fail when a rank or the first request needs a missing
    method."""
    missing = [part for part in ("mode", "worker") if not hasattr(found, part)]
    missing += [part for part in _METHODS if not callable(getattr(found, part, None))]
    if not callable(found) or missing:
        raise KVConfigError(
            f"KV connector {name!r} is not a connector: wanted a class with the methods of "
            f"mooncake_kv.connector.Connector, a mode and a worker; {found!r} lacks "
            f"{', '.join(missing) or 'a constructor'}"
        )
    connector = cast(ConnectorType, found)
    if not isinstance(connector.mode, TransferMode):
        raise KVConfigError(
            f"KV connector {name!r}: mode must be a TransferMode, got {connector.mode!r}"
        )
    return connector
