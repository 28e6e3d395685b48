"""The instances behind the proxy: what they are, whether they are live, what they carry now."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import product

from msgspec import Struct

from mooncake_proxy.errors import Conflict, NoInstance, NotFound
from mooncake_proxy.http1.connection_pool import ConnectionPool
from mooncake_proxy.http1.http_wire import Origin
from mooncake_proxy.http1.upstream_connection import ClientContext
from mooncake_proxy.pool.bootstrap_server import BootstrapServer
from mooncake_proxy.pool.device_classes import relative_speed
from mooncake_proxy.pool.dp_ranks import DPRanks, RequestLoad
from mooncake_proxy.pool.pair_topology import PairTopology, why_incompatible

logger = logging.getLogger(__name__)
# The host of a ZMQ address that is listened on everywhere.
_WILDCARD = re.compile(r"(?<=^tcp://)(\*|0\.0\.0\.0|\[::\]|::)(?=:\d+$)")


class Role(Enum):
    """What an instance does. BOTH serves whole requests, without a KV transfer."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"

    def __init__(self, label: str) -> None:
        # `value` and the hash of an enum are Python calls; these are read several times a request.
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
    # A D that sends the first token again (vLLM): then P's is not forwarded.
    emits_first_token: bool = False
    # A D that may answer `stop_reason: "recomputed"` (vLLM-Ascend's recompute scheduler).
    recomputes: bool = False
    # Where a P with vLLM's own Mooncake connector has its bootstrap server.
    bootstrap_port: int | None = None
    # Where it publishes KV events and answers for lost ones, if its health does not say so.
    kv_events_port: int | None = None
    kv_events_replay_port: int | None = None
    # Who declared it: flags, file, api, kubernetes. Each source only removes its own.
    source: str = "flags"
    # What requests call its model: the first name is that of its pool, the others are aliases and
    # adapters. Empty: it takes what no pool has a name for.
    models: tuple[str, ...] = ()

    @property
    def repeats_first_token(self) -> bool:
        """Whether its stream holds the first token too. One that may give a request back sends its
        whole stream: nothing of P's may stand before what is decoded anew."""
        return self.emits_first_token or self.recomputes

    @property
    def name(self) -> str:
        """Its name in metrics, logs and the admin API: the URL."""
        return str(self.origin)

    @property
    def model(self) -> str:
        """Of its pool; empty where it has no name."""
        return self.models[0] if self.models else ""


def names_given_twice(specs: Iterable[InstanceSpec]) -> str:
    """Of instances that are declared more than once: each has one role and one model."""
    names = [spec.name for spec in specs]
    return ", ".join(sorted({name for name in names if names.count(name) > 1}))


class KVEventEndpoints(Struct, frozen=True):
    """Where an instance publishes which blocks it holds (`--kv-events-config`), as ZMQ has it."""

    endpoint: str
    replay_endpoint: str | None = None
    # Of its data-parallel ranks from the second one on.
    other_dp_ranks: tuple[KVEventEndpoints, ...] = ()
    # Of a store: which of its events are of the instance's model.
    namespace: str | None = None

    def seen_from(self, host: str) -> KVEventEndpoints:
        """The same for somebody who reaches the instance at `host`."""
        replay = self.replay_endpoint
        return KVEventEndpoints(
            _WILDCARD.sub(host, self.endpoint),
            None if replay is None else _WILDCARD.sub(host, replay),
            tuple(rank.seen_from(host) for rank in self.other_dp_ranks),
            self.namespace,
        )


class StoreLocation(Struct, frozen=True):
    """Where other instances find what an instance saves to the KVCache pool, and the store's epoch:
    restarted, it holds nothing of what was said."""

    host: str
    port: int
    epoch: str


class PoolUse(Struct, frozen=True):
    """An instance uses the KVCache pool. `store` is None where others can't read what it saves,
    `kv_events` where that is not published."""

    store: StoreLocation | None = None
    kv_events: KVEventEndpoints | None = None


class Compatibility(Struct, frozen=True):
    """What an instance's health reports: which peers it cannot exchange KV with, where its events
    are, and how it uses the KVCache pool; empty by default."""

    # Of this start of the instance (epoch).
    engine_id: str = ""
    # Engine ids that it can't exchange KV with.
    refused_peers: frozenset[str] = frozenset()
    kv_events: KVEventEndpoints | None = None
    kv_pool: PoolUse | None = None
    # Its data-parallel ranks; 0 if it does not say.
    data_parallel_size: int = 0


class PoolReport(Struct, frozen=True):
    """What an instance's health reports of the KVCache pool, in chunks since its start."""

    saved: int = 0
    # What it looked up and found, by tier.
    found: dict[str, int] = {}


class Instance(RequestLoad):
    """One instance with its connections and its load as this proxy knows it."""

    __slots__ = (
        "_context",
        "_heads",
        "bootstrap",
        "bytes_received",
        "compatibility",
        "connections",
        "declared",
        "dp_ranks",
        "error",
        "is_draining",
        "is_up",
        "kv_pool",
        "name",
        "relative_speed",
        "spec",
        "topology",
        "unfit_peers",
        "warned",
    )

    def __init__(self, spec: InstanceSpec, context: ClientContext) -> None:
        super().__init__()
        self._context = context
        self.bootstrap: BootstrapServer | None = None
        self.become(spec)
        # As its source has it, whatever role operators have given it since.
        self.declared = spec
        self.name = spec.name
        self.connections = ConnectionPool(spec.origin, context)
        self.is_up = True
        self.is_draining = False
        # Why it is down, for people.
        self.error = ""
        self.compatibility = Compatibility()
        # None: it has one, or does not say how many.
        self.dp_ranks: DPRanks | None = None
        # None: it uses none, or does not say so.
        self.kv_pool: PoolReport | None = None
        # Of KV, by engine id of who sent it, since its start.
        self.bytes_received: dict[str, int] = {}
        # As it publishes it; None: not known, or nothing is published.
        self.topology: PairTopology | None = None
        # Of its devices, in that of one A100; for policies that compare loads.
        self.relative_speed = 1.0
        # Engine ids whose topology does not go together with its own.
        self.unfit_peers: frozenset[str] = frozenset()
        self.warned: set[str] = set()
        self._heads: dict[str, bytes] = {}

    def become(self, spec: InstanceSpec) -> None:
        """Take over a new spec."""
        self.spec = spec
        if self.bootstrap is not None:
            self.bootstrap.close()
            self.bootstrap = None
        if spec.bootstrap_port is not None and spec.role is Role.PREFILL:
            self.bootstrap = BootstrapServer(spec.origin, spec.bootstrap_port, self._context)

    @property
    def state(self) -> InstanceState:
        """UP, DOWN or DRAINING."""
        if self.is_draining:
            return InstanceState.DRAINING
        return InstanceState.UP if self.is_up else InstanceState.DOWN

    @property
    def kv_events(self) -> KVEventEndpoints | None:
        """Where its KV events are, as far as is known."""
        spec, host = self.spec, _in_url(self.spec.origin.host)
        if spec.kv_events_port is not None:
            replay = spec.kv_events_replay_port
            return KVEventEndpoints(
                f"tcp://{host}:{spec.kv_events_port}",
                None if replay is None else f"tcp://{host}:{replay}",
            )
        published = self.compatibility.kv_events
        return None if published is None else published.seen_from(host)

    @property
    def store_kv_events(self) -> KVEventEndpoints | None:
        """Where the store that it saves to publishes what it holds, if it does."""
        use = self.compatibility.kv_pool
        if use is None or use.kv_events is None:
            return None
        host = self.spec.origin.host if use.store is None else use.store.host
        return use.kv_events.seen_from(_in_url(host))

    def is_compatible(self, peer: Instance) -> bool:
        """Whether neither of the two has refused to exchange KV with the other, or would."""
        own, other = self.compatibility, peer.compatibility
        return (
            own.engine_id not in other.refused_peers
            and other.engine_id not in own.refused_peers
            and other.engine_id not in self.unfit_peers
            and own.engine_id not in peer.unfit_peers
        )

    @property
    def has_other_ranks(self) -> bool:
        """Whether a client can't mean this one if it names a data-parallel rank: that is where
        answers come from, and a prefill instance may have fewer."""
        return self.spec.role is Role.PREFILL and self.compatibility.data_parallel_size > 0

    def build_post(self, path: str, request_id: str, extra: bytes, body: bytes) -> bytes:
        """A POST of JSON to this instance, ready to be written."""
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
        """A GET to this instance, with `extra` header lines."""
        origin = self.spec.origin
        head = f"GET {origin.prefix}{path} HTTP/1.1\r\nhost: {origin.authority}\r\n"
        return b"%b%b\r\n" % (head.encode("latin-1"), extra)

    def warn_once(self, key: str, message: str) -> None:
        """Log a warning about this instance once per key."""
        if key not in self.warned:
            self.warned.add(key)
            logger.warning("%s: %s", self.name, message)


class InstancePool:
    """All instances of one model. Lists of live ones are kept ready; they change rarely and are
    read always."""

    def __init__(self, context: ClientContext) -> None:
        self._context = context
        # What requests may call the model; empty for the pool of instances without a name.
        self.model_names: frozenset[str] = frozenset()
        self._instances: dict[str, Instance] = {}
        # By Role.index.
        self._live: list[tuple[Instance, ...]] = [()] * len(Role)
        self._leaving: set[str] = set()
        # New specs of instances that are drained to change their roles.
        self._becoming: dict[str, InstanceSpec] = {}
        self.version = 0
        # Whether a request can be prefilled by one instance and decoded by another now.
        self.can_disaggregate = False
        # Whether some live instances can't exchange KV with others; else no comparison is needed.
        self.has_incompatible_pairs = False
        self._paired: frozenset[Instance] = frozenset()
        # Whether any instance may give requests back: then token ids are recorded.
        self.recomputes = False
        # Whether any decode instance sends the first token again, but for a continued prompt.
        self.emits_first_token = False
        # Whether all D's serve several answers from one reservation.
        self.splits_choices = False
        # Whether all P's and D's let KV be pulled while it is computed.
        self.pulls_early = False
        self._refresh()

    def __iter__(self) -> Iterator[Instance]:
        return iter(tuple(self._instances.values()))

    def __len__(self) -> int:
        return len(self._instances)

    def __contains__(self, name: str) -> bool:
        return name in self._instances

    def get(self, name: str) -> Instance:
        """The instance of that name, or NotFound with the names there are."""
        instance = self._instances.get(name)
        if instance is None:
            known = ", ".join(self._instances) or "none"
            raise NotFound(f"no instance {name!r}; known: {known}")
        return instance

    def live(self, role: Role) -> tuple[Instance, ...]:
        """Instances that take new requests of a role."""
        return self._live[role.index]

    def undisaggregated_role(self) -> Role | None:
        """The role that can serve whole requests now: BOTH if there is one, else DECODE."""
        if self._live[Role.BOTH.index]:
            return Role.BOTH
        return Role.DECODE if self._live[Role.DECODE.index] else None

    def require(self, role: Role) -> tuple[Instance, ...]:
        """The same, or NoInstance."""
        live = self._live[role.index]
        if not live:
            raise NoInstance(self._explain(role), code=f"no_live_{role.value}")
        return live

    def is_paired(self, instance: Instance) -> bool:
        """Whether a live instance of the other role can exchange KV with it."""
        return instance in self._paired

    def require_pair(self) -> None:
        """A live P and a live D that can exchange KV, or NoInstance."""
        self.require(Role.PREFILL)
        self.require(Role.DECODE)
        if not self.can_disaggregate:
            message = "no live prefill instance can exchange KV with a live decode instance"
            raise NoInstance(f"{message}; their logs have the reason", code="no_fitting_pair")

    # ------------------------------------------------ changes

    def add(self, spec: InstanceSpec) -> Instance:
        """A new instance, or a new spec of a known one, which is resumed. A busy one is drained
        before it changes its role."""
        known = self._instances.get(spec.name)
        if known is not None:
            known.declared = spec
            if known.spec.role is not spec.role:
                return self._change_role(known, spec)
            known.become(spec)
            return self.resume(spec.name)
        instance = self._instances[spec.name] = Instance(spec, self._context)
        logger.info("instance added: %s (%s)", spec.name, spec.role.value)
        self._refresh()
        return instance

    def _change_role(self, instance: Instance, spec: InstanceSpec) -> Instance:
        if instance.total_running:
            if self._becoming.get(spec.name) != spec:
                self.drain(spec.name)
                self._becoming[spec.name] = spec
                message = "instance %s is drained, as it shall become %s"
                logger.info(message, spec.name, spec.role.value)
            return instance
        self._becoming.pop(spec.name, None)
        self.switch_role(spec.name, spec.role)
        instance.become(spec)
        return self.resume(spec.name)

    def finish_drains(self) -> None:
        """Remove instances, or change their roles, that waited for requests to end."""
        for instance in tuple(self):
            if instance.is_draining:
                self.finish_drain(instance)

    def drain(self, name: str, *, then_remove: bool = False) -> Instance:
        """No new requests; what runs is finished. `then_remove` forgets it when it is idle."""
        instance = self.get(name)
        instance.is_draining = True
        if then_remove:
            self._leaving.add(name)
        self._refresh()
        self.finish_drain(instance)
        return instance

    def resume(self, name: str) -> Instance:
        """Undo a drain or an ejection: it gets requests, until a health check fails."""
        instance = self.get(name)
        instance.is_draining = False
        self._leaving.discard(name)
        self._becoming.pop(name, None)
        self.set_up(instance, up=True)
        self._refresh()
        return instance

    def remove(self, name: str) -> None:
        """Forget it now. What runs on it keeps its connection until it ends."""
        instance = self.get(name)
        del self._instances[name]
        self._leaving.discard(name)
        self._becoming.pop(name, None)
        instance.connections.close()
        logger.info("instance removed: %s", name)
        self._refresh()

    def switch_role(self, name: str, role: Role) -> Instance:
        """P becomes D or the reverse; only when nothing runs on it."""
        instance = self.get(name)
        if instance.total_running:
            raise Conflict(
                f"{name} runs {instance.total_running} requests and only an idle instance can "
                "switch its role: drain it first"
            )
        instance.become(replace(instance.spec, role=role))
        instance.warned.clear()
        self._refresh()
        logger.info("instance %s is now %s", name, role.value)
        return instance

    def set_up(self, instance: Instance, *, up: bool, error: str = "") -> None:
        """The verdict of the health checks."""
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
        """Note what an instance reports of itself and its peers."""
        if instance.compatibility != compatibility:
            instance.compatibility = compatibility
            num_ranks = compatibility.data_parallel_size
            if num_ranks != len(instance.dp_ranks or ()):
                several = num_ranks > 1
                instance.dp_ranks = DPRanks(instance.name, num_ranks) if several else None
            self._refresh()

    def note_topology(self, instance: Instance, topology: PairTopology) -> None:
        """Note what an instance publishes; it is compared with all others before any request."""
        if instance.topology != topology:
            instance.topology = topology
            instance.relative_speed = relative_speed(topology)
            self._refresh()

    def close(self) -> None:
        """Close all connections."""
        for instance in self._instances.values():
            instance.connections.close()

    def finish_drain(self, instance: Instance) -> None:
        """What a drain was for, once nothing runs on the instance: to remove it, or to change its
        role."""
        name = instance.name
        if instance.num_running or name not in self._instances:
            return
        if name in self._leaving:
            self.remove(name)
        elif name in self._becoming and not instance.total_running:
            self._change_role(instance, self._becoming[name])

    def _refresh(self) -> None:
        self.version += 1
        takes = [i for i in self._instances.values() if i.is_up and not i.is_draining]
        self.model_names = frozenset(n for i in self._instances.values() for n in i.spec.models)
        self.recomputes = any(i.spec.recomputes for i in takes)
        self.emits_first_token = any(i.spec.emits_first_token for i in takes)
        for role in Role:
            self._live[role.index] = tuple(i for i in takes if i.spec.role is role)
        self._find_pairs()

    def _find_pairs(self) -> None:
        """Find who can exchange KV. Refusals are rare: without any, nothing is compared."""
        prefills, decodes = self.live(Role.PREFILL), self.live(Role.DECODE)
        self.has_incompatible_pairs = False
        self.can_disaggregate = bool(prefills and decodes)
        self._compare_topologies(prefills, decodes)
        instances = (*prefills, *decodes)
        self.splits_choices = all(
            i.topology is not None and i.topology.splits_choices for i in decodes
        )
        self.pulls_early = all(i.topology is not None and i.topology.pulls_early for i in instances)
        if not any(i.compatibility.refused_peers or i.unfit_peers for i in instances):
            return
        paired: set[Instance] = set()
        for prefill, decode in product(prefills, decodes):
            if prefill.is_compatible(decode):
                paired |= {prefill, decode}
            else:
                self.has_incompatible_pairs = True
                prefill.warn_once(
                    f"incompatible {decode.compatibility.engine_id}",
                    f"cannot exchange KV with {decode.name}: no request uses both",
                )
        self._paired = frozenset(paired)
        self.can_disaggregate = bool(paired)

    def _compare_topologies(
        self, prefills: Sequence[Instance], decodes: Sequence[Instance]
    ) -> None:
        for prefill in prefills:
            unfit = set()
            for decode in decodes:
                mine, theirs = prefill.topology, decode.topology
                if mine is None or theirs is None:
                    continue
                if (reason := why_incompatible(mine, theirs)) is not None:
                    unfit.add(theirs.engine_id)
                    key = f"unfit {mine.engine_id} {theirs.engine_id}"
                    prefill.warn_once(key, f"does not go together with {decode.name}: {reason}")
            prefill.unfit_peers = frozenset(unfit)

    def _explain(self, role: Role) -> str:
        wanted = [i for i in self._instances.values() if i.spec.role is role]
        if not wanted:
            flag = "backend-url" if role is Role.BOTH else role.value
            how = f"--{flag} URL here, or --register on the instance"
            return f"no {role.value} instance is configured, and none has registered ({how})"
        facts = "; ".join(f"{i.name} {i.state.value} {i.error}".rstrip() for i in wanted)
        return f"no live {role.value} instance: {facts}"


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host
