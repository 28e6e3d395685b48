"""The connector interface that the engine uses, and how a connector is found."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    """A load is over; its KV is complete if ``error`` is None.

    Args:
        request_id: whose.
        error: why it failed.
        first_token: the peer's token, if it came with the KV.
        is_drained: False if the peer may still write; another LoadEnded follows then.
    """

    request_id: str
    error: str | None
    first_token: FirstToken | None = None
    is_drained: bool = True


@dataclass(frozen=True, slots=True)
class LeaseEnded:
    """A finished prefill's blocks are no longer held for anybody."""

    request_id: str


@dataclass(frozen=True, slots=True)
class ConnectorFailed:
    """A background task of the connector died; so does the engine."""

    cause: BaseException


Event = LoadEnded | LeaseEnded | ConnectorFailed
PostEvent = Callable[[Event], None]
"""Takes an event, from any thread; must not block."""


HasStalled = Callable[[], bool]
"""Whether the engine does not step: nothing that is held for it is going to be used soon. Any
thread."""


def never_stalls() -> bool:
    """Of an engine whose steps nobody watches."""
    return False


class RankEndpointInfo(msgspec.Struct, frozen=True):
    """How a rank is reached: transport name to address."""

    endpoints: dict[str, bytes]


class Topology(msgspec.Struct, frozen=True):
    """What an instance publishes to those who want to reach it.

    Args:
        engine_id: name of this epoch.
        host, port: its side channel.
        tp_size, pp_size: ranks of a pipeline stage, and stages.
        block_size: tokens per block.
        backend, generation: what it runs on.
        ranks: each rank's endpoints, stage after stage.
        transports: those that all ranks have open, with what each asks of both ends.
        must_match: facts that instances which exchange KV have alike, by name.
        pulls_early: KV can be pulled while it is computed, into blocks that were reserved before.
        rounding: how its KV was rounded, by name; may differ.
        splits_choices: several answers to one prompt are served from one reservation.
        dp_size: data-parallel ranks, of which this is the first one's; each has a side channel.
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


class CompatibilityReport(msgspec.Struct, frozen=True):
    """Who can't exchange KV, for those who choose pairs of instances, and who did.

    Args:
        engine_id: name of this epoch.
        refused_peers: epochs whose handshake with it was refused.
        bytes_received: of KV, by the epoch that it came from; of the latest ones.
    """

    engine_id: str
    refused_peers: tuple[str, ...]
    bytes_received: dict[str, int] = {}


class Connector(Protocol):
    """The scheduler's side of a connector. Its calls return at once; I/O is on its own thread."""

    def on_rank_message(self, rank: int, message: bytes) -> None:
        """A rank's worker sent this, maybe before ``start``. Any thread; returns at once."""
        ...

    def start(
        self,
        instance: InstanceMetadata,
        *,
        send: SendToRank,
        post: PostEvent,
        has_stalled: HasStalled = never_stalls,
    ) -> None:
        """Wait for the ranks, bind the ports, begin to serve peers.

        Args:
            instance: what is served; its ``ranks`` and ``host`` are filled in here.
            send: carries a message to a rank's worker.
            post: takes the connector's events, from any thread; must not block.
            has_stalled: keepalives stop while this says so: peers need not hold KV for an engine
                that may never read it.

        Raises:
            SideChannelPortTaken: a port is in use.
            KVConfigError: a rank did not come up.
        """
        ...

    def stats(self) -> dict[str, float]:
        """Figures by name, for metrics."""
        ...

    def compatibility(self) -> CompatibilityReport:
        """Whom this instance can't exchange KV with, as far as it has been tried. Any thread."""
        ...

    def topology(self) -> Topology:
        """Where this instance is to be reached, and what it is. Any thread, once started."""
        ...

    def close(self) -> None:
        """Stop. What is held or loading is given up. Idempotent."""
        ...

    def on_new_request(self, request_id: str, params: KVTransferParams) -> None:
        """A request has come that hands KV over (``params.mode`` is not NONE).

        On a prefill instance that pushes, its KV may leave as it is computed; on a decode instance
        that pulls, the peer's lease is kept alive from now on.
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
        """Load a prompt's KV from that token on; ``LoadEnded`` follows, whatever happens.

        Where nothing is left to load, the peer still learns that it may free its blocks.

        Args:
            request_id: of a request that ``on_new_request`` announced.
            block_ids: its block table; the connector may have them written until the load is
                drained.
            prompt_token_ids: all of the prompt.
            num_computed_tokens: the first tokens, whose KV is there already.
            cache_salt: of the request; a part of the prompt's digest.
        """
        ...

    def prefill_advanced(
        self, request_id: str, block_ids: Sequence[int], num_computed_tokens: int, attempt: int
    ) -> None:
        """A part of a prompt is computed whose KV goes to a peer as it is (``params.target``).

        Args:
            request_id: whose.
            block_ids: its block table.
            num_computed_tokens: the first tokens, whose KV is there.
            attempt: another one whenever the request has lost its blocks meanwhile.
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
        """A prefill for a peer is complete: hold its blocks until ``LeaseEnded``.

        Args:
            request_id: whose.
            block_ids: its block table.
            prompt_token_ids: all of the prompt.
            first_token: sampled behind it.
            cache_salt: of the request; a part of the prompt's digest.
            attempt: as in ``prefill_advanced``.

        Returns:
            ``kv_transfer_params`` for the peer to fetch the KV; None if it is sent there.
        """
        ...

    def cancel_load(self, request_id: str) -> None:
        """A decode instance's request has ended before its KV was there. Idempotent.

        If a load was started, ``LoadEnded`` follows when it is drained.
        """
        ...

    def cancel_send(self, request_id: str) -> None:
        """Stop holding or sending a prompt's KV; ``LeaseEnded`` follows when its blocks are free.
        Idempotent."""
        ...


_METHODS = tuple(name for name in vars(Connector) if not name.startswith("_"))


class ConnectorType(Protocol):
    """A connector's class, as ``find_connector`` returns it."""

    mode: TransferMode
    """Which side moves the bytes."""
    worker: Callable[[RankContext], ConnectorWorker]
    """Its worker's class."""

    def __call__(self, config: KVTransferConfig, num_ranks: int) -> Connector:
        """Construct the scheduler's side; nothing is opened before ``start``."""
        ...


def find_connector(name: str) -> ConnectorType:
    """A connector by its name, an entry point of the group CONNECTOR_GROUP, or by where its class
    is: ``package.module:Class``.

    Raises:
        KVConfigError: there is none, its module can't be loaded, or it is no connector.
    """
    known = {point.name: point for point in entry_points(group=CONNECTOR_GROUP)}
    point = known.get(name)
    if point is None and ":" in name:
        point = EntryPoint(name, name, CONNECTOR_GROUP)
    if point is None:
        raise KVConfigError(
            f"KV connector {name!r} is not known; known are {sorted(known)}, and classes as "
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
    """Now, and not when a rank or the first request asks for what it has not."""
    missing = [part for part in ("mode", "worker") if not hasattr(found, part)]
    missing += [part for part in _METHODS if not callable(getattr(found, part, None))]
    if not callable(found) or missing:
        raise KVConfigError(
            f"KV connector {name!r} is no connector: wanted a class with the methods of "
            f"mooncake_kv.connector.Connector, a mode and a worker; {found!r} lacks "
            f"{', '.join(missing) or 'a constructor'}"
        )
    connector = cast(ConnectorType, found)
    if not isinstance(connector.mode, TransferMode):
        raise KVConfigError(
            f"KV connector {name!r}: its mode must be one of TransferMode's, got {connector.mode!r}"
        )
    return connector
