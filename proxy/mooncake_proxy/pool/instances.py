"""The instances behind the proxy and the pool of each model: declaration, state and current load.

Health checks, watchers and the admin API change the pool; the router reads it for every request.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import Enum
from ipaddress import ip_address
from itertools import chain

from mooncake_proxy.errors import ConfigError, Conflict, NoInstance, NotFound
from mooncake_proxy.http1.connection_pool import ConnectionPool
from mooncake_proxy.http1.http_wire import MAX_PORT, Origin
from mooncake_proxy.http1.upstream_connection import ClientContext
from mooncake_proxy.pool.bootstrap_server import BootstrapServer
from mooncake_proxy.pool.device_classes import relative_speed
from mooncake_proxy.pool.dp_ranks import MAX_DP_RANKS, DPRank, DPRanks, RequestLoad
from mooncake_proxy.pool.incompatible_pairs import compare_topologies, unfit_pairs
from mooncake_proxy.pool.instance_reports import (
    Compatibility,
    KVEventEndpoints,
    PoolReport,
    PoolUse,
)
from mooncake_proxy.pool.pair_topology import PairTopology

logger = logging.getLogger(__name__)


class Role(Enum):
    """What an instance does. BOTH serves whole requests without a KV transfer."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"

    def __init__(self, label: str) -> None:
        # An enum's `value` and hash are Python calls; these are read several times per request.
        self.label = label
        self.index = len(type(self).__members__)


class InstanceState(Enum):
    """Whether an instance gets new requests."""

    UP = "up"
    DOWN = "down"
    DRAINING = "draining"


@dataclass(frozen=True, slots=True)
class InstanceSpec:
    """What the operator declares about an instance."""

    origin: Origin
    role: Role
    # A D that repeats the first token (vLLM): then P's is not forwarded.
    emits_first_token: bool = False
    # A D that may answer `stop_reason: "recomputed"` (vLLM-Ascend's recompute scheduler).
    recomputes: bool = False
    # Bootstrap server of a P with vLLM's Mooncake connector.
    bootstrap_port: int | None = None
    # Ports of its KV events and of their replay, if its health endpoint does not report them.
    kv_events_port: int | None = None
    kv_events_replay_port: int | None = None
    # KV events of the node stores that it uses, if it is of an engine that does not report them.
    store_kv_events: tuple[KVEventEndpoints, ...] = ()
    # Who declared it: flags, file, api, kubernetes, register. A source only removes its own.
    source: str = "flags"
    # Names of its model in requests: the first is the name of its pool, the others are aliases and
    # adapters. Empty: it serves requests for models that no other pool has.
    models: tuple[str, ...] = ()
    # Number of its data-parallel ranks, if its health endpoint does not report it (vLLM).
    data_parallel_size: int = 1

    def __post_init__(self) -> None:
        for field in ("bootstrap_port", "kv_events_port", "kv_events_replay_port"):
            port = getattr(self, field)
            if port is not None and not 1 <= port <= MAX_PORT:
                raise ConfigError(f"instance {self.name}: {field} {port}: wanted 1 to {MAX_PORT}")
        if not 1 <= (size := self.data_parallel_size) <= MAX_DP_RANKS:
            wanted = f"wanted 1 to {MAX_DP_RANKS}"
            raise ConfigError(f"instance {self.name}: data_parallel_size {size}: {wanted}")

    @property
    def repeats_first_token(self) -> bool:
        """Whether its stream includes the first token.

        That also holds for instances that may return requests for recomputation: they send their
        whole stream, so that the recomputed answer never follows a token of P.
        """
        return self.emits_first_token or self.recomputes

    @property
    def name(self) -> str:
        """The instance's name in metrics, logs and the admin API: its URL."""
        return str(self.origin)

    @property
    def model(self) -> str:
        """Name of its pool's model; empty if it was declared without one."""
        return self.models[0] if self.models else ""


def duplicate_names(specs: Iterable[InstanceSpec]) -> str:
    """Comma-separated names of instances that are declared more than once.

    That is an error, because an instance has one role and one model.
    """
    names = [spec.name for spec in specs]
    return ", ".join(sorted({name for name in names if names.count(name) > 1}))


class Instance(RequestLoad):
    """One instance: its spec, connections, health and the load that this proxy knows of."""

    __slots__ = (
        "_context",
        "_heads",
        "base_models",
        "bootstrap",
        "bytes_received",
        "compatibility",
        "connections",
        "declared",
        "dp_ranks",
        "error",
        "has_reported",
        "incompatible_peers",
        "is_draining",
        "is_up",
        "is_withdrawn",
        "kv_pool",
        "lists_models",
        "name",
        "num_failures",
        "relative_speed",
        "spec",
        "topology",
        "warned",
    )

    def __init__(self, spec: InstanceSpec, context: ClientContext) -> None:
        super().__init__()
        self._context = context
        self.bootstrap: BootstrapServer | None = None
        self.compatibility = Compatibility()
        # None: a single rank, or the number is not known.
        self.dp_ranks: DPRanks | None = None
        self.set_spec(spec)
        # The spec as declared by its source, whatever role it has switched to since.
        self.declared = spec
        # Whether its source no longer declares it: it leaves once it is idle.
        self.is_withdrawn = False
        self.name = spec.name
        self.connections = ConnectionPool(spec.origin, context)
        self.is_up = True
        self.is_draining = False
        # Consecutive requests that failed because of it.
        self.num_failures = 0
        # Human-readable reason why it is down.
        self.error = ""
        # Whether a health check has read its report, which may be empty.
        self.has_reported = False
        # None: it uses no KVCache pool, or does not report it.
        self.kv_pool: PoolReport | None = None
        # Names that mean its model itself, not an adapter; None: not known. Only of instances that
        # publish KV events.
        self.base_models: frozenset[str] | None = None
        # False: it has refused to list its models, and is not asked again before it restarts.
        self.lists_models = True
        # KV bytes received since its start, by the sender's engine id.
        self.bytes_received: dict[str, int] = {}
        # Published by the instance; None: not known yet.
        self.topology: PairTopology | None = None
        # Speed of all its devices relative to one A100; policies divide loads by it.
        self.relative_speed = 1.0
        # Engine ids of peers whose topology is incompatible with its own.
        self.incompatible_peers: frozenset[str] = frozenset()
        self.warned: set[str] = set()
        self._heads: dict[str, bytes] = {}

    def set_spec(self, spec: InstanceSpec) -> None:
        """Apply a new spec."""
        self.spec = spec
        if self.bootstrap is not None:
            self.bootstrap.close()
            self.bootstrap = None
        if spec.bootstrap_port is not None and spec.role is Role.PREFILL:
            self.bootstrap = BootstrapServer(spec.origin, spec.bootstrap_port, self._context)
        self._update_dp_ranks()

    def set_compatibility(self, compatibility: Compatibility) -> None:
        """Apply what it reports."""
        self.compatibility, self.has_reported = compatibility, True
        self._update_dp_ranks()

    def _update_dp_ranks(self) -> None:
        size = self.data_parallel_size
        if size != len(self.dp_ranks or ()):
            self.dp_ranks = DPRanks(self.spec.name, size) if size > 1 else None

    @property
    def data_parallel_size(self) -> int:
        """Number of its data-parallel ranks, as it reports or else as it was declared."""
        size = self.compatibility.data_parallel_size or self.spec.data_parallel_size
        return min(size, MAX_DP_RANKS)

    @property
    def state(self) -> InstanceState:
        """UP, DOWN or DRAINING."""
        if self.is_draining:
            return InstanceState.DRAINING
        return InstanceState.UP if self.is_up else InstanceState.DOWN

    @property
    def reported_dp_ranks(self) -> Iterable[DPRank]:
        """Its data-parallel ranks, if it reports their queues."""
        return (self.dp_ranks or ()) if self.compatibility.data_parallel_size else ()

    @property
    def kv_events(self) -> KVEventEndpoints | None:
        """Endpoints of its KV events, from its spec or its health report; None if unknown."""
        spec, host = self.spec, _in_url(self.spec.origin.host)
        if spec.kv_events_port is not None:
            replay_port, num_ranks = spec.kv_events_replay_port, self.data_parallel_size
            return KVEventEndpoints.of_ranks(host, spec.kv_events_port, replay_port, num_ranks)
        published = self.compatibility.kv_events
        return None if published is None else published.with_host(host)

    @property
    def stores(self) -> tuple[PoolUse, ...]:
        """The node stores that it uses, with hosts in place of wildcards in their addresses: first
        the one that it saves to, without addresses while that can't be used. Stores without a
        location are on its host."""
        use = self.compatibility.kv_pool
        if use is None:
            return ()
        found = []
        for each in (use, *use.other_stores):
            host = self.spec.origin.host if each.store is None else each.store.host
            events = each.kv_events and each.kv_events.with_host(_in_url(host))
            metrics = each.metrics and each.metrics.replace("*", _in_url(host))
            found.append(PoolUse(each.store, events, metrics))
        return tuple(found)

    @property
    def store_kv_events(self) -> tuple[KVEventEndpoints, ...]:
        """Endpoints of the KV events of the node stores that it uses and that publish any, from its
        health report, or from its spec if it is of an engine that reports nothing."""
        report = self.compatibility
        if report.kv_pool is None and not report.data_parallel_size:
            return self.spec.store_kv_events
        found = (use.kv_events for use in self.stores)
        return tuple(dict.fromkeys(events for events in found if events is not None))

    @property
    def store_metrics(self) -> tuple[Origin, ...]:
        """Where the node stores that it uses serve metrics of their own, without those that only
        processes of its own host can read, where that is not this one."""
        found = []
        for metrics in (use.metrics for use in self.stores if use.metrics is not None):
            with suppress(ConfigError):  # no address, whatever sent it
                origin = Origin.parse(f"http://{metrics}")
                if not is_loopback(origin.host) or is_loopback(self.spec.origin.host):
                    found.append(origin)
        return tuple(found)

    def is_compatible(self, peer: Instance) -> bool:
        """Whether the two instances can exchange KV, by their refusals and their topologies."""
        own, other = self.compatibility, peer.compatibility
        return (
            own.engine_id not in other.refused_peers
            and other.engine_id not in own.refused_peers
            and other.engine_id not in self.incompatible_peers
            and own.engine_id not in peer.incompatible_peers
        )

    def ruled_out(self, peers: Mapping[str, Sequence[Instance]]) -> Iterator[Instance]:
        """Those of `peers`, by engine id, with which this side can't exchange KV."""
        for engine_id in self.compatibility.refused_peers | self.incompatible_peers:
            yield from peers.get(engine_id, ())

    @property
    def has_other_ranks(self) -> bool:
        """Whether a data-parallel rank named by the client does not refer to this instance.

        The client means ranks of the instance that answers, that is D; P may have fewer ranks.
        """
        return self.spec.role is Role.PREFILL and self.compatibility.data_parallel_size > 0

    def build_post(self, path: str, request_id: str, extra: bytes, body: bytes) -> bytes:
        """Bytes of a POST request with a JSON body to this instance."""
        head = self._heads.get(path)
        if head is None:
            origin = self.spec.origin
            head = (
                f"POST {origin.prefix}{path} HTTP/1.1\r\nhost: {origin.authority}\r\n"
                "content-type: application/json\r\nx-request-id: "
            ).encode("latin-1")
            self._heads[path] = head
        return b"%b%b\r\n%bcontent-length: %d\r\n\r\n%b" % (
            head,
            request_id.encode("latin-1"),
            extra,
            len(body),
            body,
        )

    def build_get(self, path: str, extra: bytes = b"") -> bytes:
        """Bytes of a GET request to this instance, with `extra` header lines."""
        origin = self.spec.origin
        head = f"GET {origin.prefix}{path} HTTP/1.1\r\nhost: {origin.authority}\r\n"
        return b"%b%b\r\n" % (head.encode("latin-1"), extra)

    def warn_once(self, key: str, message: str) -> None:
        """Log a warning about this instance once per key."""
        if key not in self.warned:
            self.warned.add(key)
            logger.warning("%s: %s", self.name, message)


class InstancePool:
    """All instances of one model.

    Derived data, such as lists of live instances, is recomputed on every change, because changes
    are rare and every request reads it.
    """

    def __init__(self, context: ClientContext) -> None:
        self._context = context
        # Names of the model in requests; empty for the pool of instances without a model name.
        self.model_names: frozenset[str] = frozenset()
        self._instances: dict[str, Instance] = {}
        # By Role.index.
        self._live: list[tuple[Instance, ...]] = [()] * len(Role)
        self._removed_when_idle: set[str] = set()
        # New specs of instances that are draining in order to switch their role.
        self._pending_specs: dict[str, InstanceSpec] = {}
        self.version = 0
        # Whether there are a live P and a live D that can exchange KV.
        self.can_disaggregate = False
        # Whether some live P and D can't exchange KV; if not, routing need not compare them.
        self.has_incompatible_pairs = False
        self._paired: frozenset[Instance] = frozenset()
        # Whether any live instance may return requests for recomputation: token ids are recorded.
        self.recomputes = False
        # Whether all live instances continue answers that others have begun, but for those that
        # have not reported yet.
        self.continues_answers = False
        # Whether any live D repeats the first token, unless it gets a continued prompt.
        self.emits_first_token = False
        # Whether all live D's serve all choices of a request from one reservation.
        self.splits_choices = False
        # Whether all live P's and D's support early pulls.
        self.pulls_early = False
        self._refresh()

    def __iter__(self) -> Iterator[Instance]:
        return iter(tuple(self._instances.values()))

    def __len__(self) -> int:
        return len(self._instances)

    def __contains__(self, name: str) -> bool:
        return name in self._instances

    def get(self, name: str) -> Instance:
        """The instance with this name. Raises NotFound, which lists the known names."""
        instance = self._instances.get(name)
        if instance is None:
            known = ", ".join(self._instances) or "none"
            raise NotFound(f"no instance {name!r}; known: {known}")
        return instance

    def live(self, role: Role) -> tuple[Instance, ...]:
        """Instances of `role` that take new requests."""
        return self._live[role.index]

    def undisaggregated_role(self) -> Role | None:
        """The role that can serve whole requests now: BOTH if there is one, else DECODE."""
        if self._live[Role.BOTH.index]:
            return Role.BOTH
        return Role.DECODE if self._live[Role.DECODE.index] else None

    def require(self, role: Role) -> tuple[Instance, ...]:
        """Instances of `role` that take new requests. Raises NoInstance if there are none."""
        live = self._live[role.index]
        if not live:
            raise NoInstance(self._explain(role), code=f"no_live_{role.value}")
        return live

    def is_paired(self, instance: Instance) -> bool:
        """Whether a live instance of the other role can exchange KV with it."""
        return instance in self._paired

    def require_pair(self) -> None:
        """Raise NoInstance unless there are a live P and a live D that can exchange KV."""
        self.require(Role.PREFILL)
        self.require(Role.DECODE)
        if not self.can_disaggregate:
            message = "no live prefill instance can exchange KV with a live decode instance"
            raise NoInstance(f"{message}; their logs have the reason", code="no_fitting_pair")

    # ------------------------------------------------ changes

    def add(self, spec: InstanceSpec) -> Instance:
        """Add an instance, or apply a new spec to a known one and resume it.

        A busy instance is drained before it switches its role.
        """
        known = self._instances.get(spec.name)
        if known is not None:
            known.declared, known.is_withdrawn = spec, False
            if known.spec.role is not spec.role:
                return self._change_role(known, spec)
            known.set_spec(spec)
            return self.resume(spec.name)
        instance = self._instances[spec.name] = Instance(spec, self._context)
        logger.info("instance added: %s (%s)", spec.name, spec.role.value)
        self._refresh()
        return instance

    def _change_role(self, instance: Instance, spec: InstanceSpec) -> Instance:
        if instance.total_running:
            self._removed_when_idle.discard(spec.name)
            if self._pending_specs.get(spec.name) != spec:
                self.drain(spec.name)
                self._pending_specs[spec.name] = spec
                message = "instance %s is draining before it switches its role to %s"
                logger.info(message, spec.name, spec.role.value)
            return instance
        self._pending_specs.pop(spec.name, None)
        self.switch_role(spec.name, spec.role)
        instance.set_spec(spec)
        return self.resume(spec.name)

    def finish_drains(self) -> None:
        """Remove instances, or change their roles, that waited for requests to end."""
        for instance in tuple(self):
            if instance.is_draining:
                self.finish_drain(instance)

    def drain(self, name: str, *, then_remove: bool = False) -> Instance:
        """Send no new requests to an instance; running ones finish.

        `then_remove`: remove the instance from the pool once it is idle.
        """
        instance = self.get(name)
        instance.is_draining = True
        if then_remove:
            self._removed_when_idle.add(name)
        self._refresh()
        self.finish_drain(instance)
        return instance

    def resume(self, name: str) -> Instance:
        """Undo a drain or an ejection: the instance gets requests until a health check fails."""
        instance = self.get(name)
        instance.is_draining = False
        self._removed_when_idle.discard(name)
        self._pending_specs.pop(name, None)
        self.set_up(instance, up=True)
        self._refresh()
        return instance

    def remove(self, name: str) -> None:
        """Remove an instance immediately. Running requests keep their connections to the end."""
        instance = self.get(name)
        del self._instances[name]
        self._removed_when_idle.discard(name)
        self._pending_specs.pop(name, None)
        instance.connections.close()
        logger.info("instance removed: %s", name)
        self._refresh()

    def switch_role(self, name: str, role: Role) -> Instance:
        """Switch an idle instance to another role. Raises Conflict if it is busy."""
        instance = self.get(name)
        if instance.total_running:
            raise Conflict(
                f"{name} runs {instance.total_running} requests and only an idle instance can "
                "switch its role: drain it first"
            )
        instance.set_spec(replace(instance.spec, role=role))
        instance.warned.clear()
        self._refresh()
        logger.info("instance %s is now %s", name, role.value)
        return instance

    def set_up(self, instance: Instance, *, up: bool, error: str = "") -> None:
        """Apply the verdict of a health check."""
        instance.error = "" if up else error
        if instance.is_up is up:
            return
        instance.is_up = up
        if up:
            logger.info("instance up: %s", instance.name)
        else:
            logger.warning("instance down: %s: %s", instance.name, error)
        self._refresh()

    def note_compatibility(self, instance: Instance, compatibility: Compatibility) -> None:
        """Update what an instance reports about itself and its peers."""
        if instance.compatibility != compatibility or not instance.has_reported:
            instance.set_compatibility(compatibility)
            self._refresh()

    def note_topology(self, instance: Instance, topology: PairTopology | None) -> None:
        """Update an instance's topology, and compare it with the others before any request. None:
        that of its current epoch is not known."""
        if instance.topology != topology:
            instance.topology = topology
            instance.relative_speed = relative_speed(topology)
            self._refresh()

    def close(self) -> None:
        """Close all connections."""
        for instance in self._instances.values():
            instance.connections.close()

    def finish_drain(self, instance: Instance) -> None:
        """Remove a drained instance, or switch its role, once it is idle."""
        name = instance.name
        if instance.num_running or name not in self._instances:
            return
        if name in self._removed_when_idle:
            self.remove(name)
        elif name in self._pending_specs and not instance.total_running:
            self._change_role(instance, self._pending_specs[name])

    def _refresh(self) -> None:
        self.version += 1
        takes = [i for i in self._instances.values() if i.is_up and not i.is_draining]
        self.model_names = frozenset(n for i in self._instances.values() for n in i.spec.models)
        self.recomputes = any(i.spec.recomputes for i in takes)
        self.emits_first_token = any(i.spec.emits_first_token for i in takes)
        known = [i.compatibility.continues_answers for i in takes if i.has_reported]
        self.continues_answers = bool(known) and all(known)
        for role in Role:
            self._live[role.index] = tuple(i for i in takes if i.spec.role is role)
        self._find_pairs()

    def _find_pairs(self) -> None:
        """Find out which instances can exchange KV."""
        prefills, decodes = self.live(Role.PREFILL), self.live(Role.DECODE)
        self.has_incompatible_pairs = False
        self.can_disaggregate = bool(prefills and decodes)
        compare_topologies(prefills, decodes)
        instances = (*prefills, *decodes)
        self.splits_choices = all(
            i.topology is not None and i.topology.splits_choices for i in decodes
        )
        self.pulls_early = all(i.topology is not None and i.topology.pulls_early for i in instances)
        unfit = unfit_pairs(prefills, decodes)
        if not unfit:
            return
        self.has_incompatible_pairs = True
        for prefill, decode in unfit:
            prefill.warn_once(
                f"incompatible {decode.compatibility.engine_id}",
                f"cannot exchange KV with {decode.name}: no request uses both",
            )
        num_unfit = Counter(chain.from_iterable(unfit))
        self._paired = frozenset(
            (
                *(prefill for prefill in prefills if num_unfit[prefill] < len(decodes)),
                *(decode for decode in decodes if num_unfit[decode] < len(prefills)),
            )
        )
        self.can_disaggregate = bool(self._paired)

    def _explain(self, role: Role) -> str:
        wanted = [i for i in self._instances.values() if i.spec.role is role]
        if not wanted:
            flag = "backend-url" if role is Role.BOTH else role.value
            how = f"--{flag} URL here, or --register on the instance"
            return f"no {role.value} instance is configured, and none has registered ({how})"
        facts = "; ".join(f"{i.name} {i.state.value} {i.error}".rstrip() for i in wanted)
        return f"no live {role.value} instance: {facts}"


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address or name."""
    try:
        return ip_address(host).is_loopback
    except ValueError:  # a name
        return host == "localhost"


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host
