"""Pool membership: changes as data, the format of pool files, and plans to reach a wanted state.

The admin API, registrations and workers use `MembershipChange`; the pool file and Kubernetes use
`MembershipPlan`.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import msgspec
from msgspec import Struct

from mooncake_proxy.errors import ConfigError, Refusal
from mooncake_proxy.http1.http_wire import MAX_PORT, Origin
from mooncake_proxy.pool.instance_reports import KVEventEndpoints
from mooncake_proxy.pool.instances import Instance, InstanceSpec, Role
from mooncake_proxy.pool.model_pools import ModelPools

logger = logging.getLogger(__name__)
_ADDRESS = r"(tcp://[^\s,/]+:(\d{1,5}))"
_STORE_EVENTS = re.compile(f"{_ADDRESS}(?:,{_ADDRESS})?(?:,([0-9a-f]+))?")


class ChangeOperation(Enum):
    """Operations on an instance."""

    ADD = "add"
    DRAIN = "drain"
    RESUME = "resume"
    REMOVE = "remove"
    ROLE = "role"


class MembershipChange(Struct, forbid_unknown_fields=True):
    """One change, as the admin API accepts it and workers forward it to each other.

    `drain` with `remove` removes the instance once it is idle.
    """

    operation: ChangeOperation
    url: str
    role: Role | None = None
    emits_first_token: bool = False
    recomputes: bool = False
    bootstrap_port: int | None = None
    kv_events_port: int | None = None
    kv_events_replay_port: int | None = None
    # As in `--store-kv-events`.
    store_kv_events: tuple[str, ...] = ()
    remove: bool = False
    source: str = "api"
    # Lease of an instance that registers itself, in seconds; 0: without a lease.
    lease_s: float = 0.0
    # Of the registration message: the instance's start, and the message's number.
    registered: tuple[float, int] | None = None
    # Names of its model in requests; the first is the name of its pool.
    models: tuple[str, ...] = ()
    data_parallel_size: int = 1

    @property
    def removes(self) -> bool:
        """Whether the instance leaves the pool, now or once it is idle."""
        is_drain = self.operation is ChangeOperation.DRAIN
        return self.operation is ChangeOperation.REMOVE or (is_drain and self.remove)


class PoolFileEntry(Struct, forbid_unknown_fields=True):
    """An instance in a pool file; a plain URL is the short form."""

    url: str
    emits_first_token: bool = False
    recomputes: bool = False
    bootstrap_port: int | None = None
    kv_events_port: int | None = None
    kv_events_replay_port: int | None = None
    store_kv_events: tuple[str, ...] = ()
    data_parallel_size: int = 1


class PoolFileModel(Struct, forbid_unknown_fields=True):
    """The instances of one model in a pool file."""

    prefill: list[str | dict[str, Any]] = []
    decode: list[str | dict[str, Any]] = []
    both: list[str | dict[str, Any]] = []
    # Other names of the model, and adapters that all of its instances serve.
    aliases: tuple[str, ...] = ()


class PoolFile(PoolFileModel, forbid_unknown_fields=True):
    """The content of a pool file: instances of one model, or of several by name."""

    models: dict[str, PoolFileModel] = {}


@dataclass(frozen=True, slots=True)
class InstanceDefaults:
    """What the command line declares of all instances of a role that it names itself, and of pods
    whose annotations don't say otherwise."""

    decode_emits_first_token: bool = False
    decode_recomputes: bool = False
    prefill_bootstrap_port: int | None = None
    kv_events_port: int | None = None
    kv_events_replay_port: int | None = None
    data_parallel_size: int = 1

    def spec(
        self, origin: Origin, role: Role, source: str, models: tuple[str, ...]
    ) -> InstanceSpec:
        """An instance of which nothing else is declared."""
        return InstanceSpec(
            origin,
            role,
            emits_first_token=role is Role.DECODE and self.decode_emits_first_token,
            recomputes=role is Role.DECODE and self.decode_recomputes,
            bootstrap_port=self.prefill_bootstrap_port if role is Role.PREFILL else None,
            kv_events_port=self.kv_events_port,
            kv_events_replay_port=self.kv_events_replay_port,
            source=source,
            models=models,
            data_parallel_size=self.data_parallel_size,
        )


@dataclass(frozen=True, slots=True)
class MembershipPlan:
    """Changes after which the pool has exactly the instances that a source declares."""

    add: tuple[InstanceSpec, ...]
    leave: tuple[str, ...]


def apply_change(pool: ModelPools, change: MembershipChange) -> Instance | None:
    """Apply a change.

    Returns:
        The instance; None if it has been removed.

    Raises:
        NotFound: there is no such instance.
        Conflict: the change does not fit the instance's state.
    """
    name = str(Origin.parse(change.url))
    if change.removes and not change.lease_s:
        pool.keep_out(name)
    if change.operation is ChangeOperation.ADD:
        return pool.add(spec_of(change))
    if change.operation is ChangeOperation.DRAIN:
        return pool.drain(name, then_remove=change.remove)
    if change.operation is ChangeOperation.RESUME:
        return pool.resume(name)
    if change.operation is ChangeOperation.ROLE:
        if change.role is None:
            raise ConfigError("a role switch needs a role: prefill, decode or both")
        return pool.switch_role(name, change.role)
    pool.remove(name)
    return None


def spec_of(change: MembershipChange) -> InstanceSpec:
    """The instance that an ADD describes."""
    if change.role is None:
        raise ConfigError(f"instance {change.url}: its role is missing (prefill, decode or both)")
    return InstanceSpec(
        Origin.parse(change.url),
        change.role,
        change.emits_first_token,
        change.recomputes,
        change.bootstrap_port,
        change.kv_events_port,
        change.kv_events_replay_port,
        tuple(parse_store_events(each) for each in change.store_kv_events),
        change.source,
        change.models,
        change.data_parallel_size,
    )


def parse_store_events(text: str) -> KVEventEndpoints:
    """Parse `tcp://HOST:PORT[,tcp://HOST:REPLAY_PORT][,NAMESPACE]`: where a node store publishes
    and replays its events, and which of them belong to the instance's model. Raises ConfigError."""
    found = _STORE_EVENTS.fullmatch(text)
    if found is not None:
        endpoint, port, replay, replay_port, namespace = found.groups()
        ports = [int(each) for each in (port, replay_port) if each]
        endpoints = KVEventEndpoints(endpoint, replay, namespace=namespace)
        has_host = endpoints.with_host("") == endpoints  # wildcards are for the store's own side
        if has_host and all(1 <= each <= MAX_PORT for each in ports):
            return endpoints
    raise ConfigError(
        f"KV events of a store {text!r}: wanted tcp://HOST:PORT, and after a comma each "
        "tcp://HOST:PORT of the replay and the model's namespace, in hexadecimal digits"
    )


def plan_membership(
    wanted: Sequence[InstanceSpec],
    present: Iterable[InstanceSpec],
    source: str,
    withdrawn: Collection[str] = (),
) -> MembershipPlan:
    """What to add, and what to drain and remove. Instances of other sources are not touched.

    `withdrawn`: names of instances that leave already, and have to be added to stay.
    """
    mine = {spec.name: spec for spec in present if spec.source == source}
    names = {spec.name for spec in wanted}
    new = tuple(s for s in wanted if mine.get(s.name) != s or s.name in withdrawn)
    return MembershipPlan(new, tuple(name for name in mine if name not in names))


def follow_source(pool: ModelPools, wanted: Sequence[InstanceSpec], source: str) -> None:
    """Add the instances that are new in a source, and drain those that are no longer in it, so that
    their running requests finish. Those that an operator has removed stay out while the source
    declares them as before.

    An entry that can't be applied is logged and skipped.
    """
    for name, removed in tuple(pool.removed.items()):
        if removed.source == source and removed not in wanted:
            del pool.removed[name]
    withdrawn = {instance.name for instance in pool if instance.is_withdrawn}
    todo = plan_membership(wanted, [i.declared for i in pool], source, withdrawn)
    for spec in todo.add:
        if pool.removed.get(spec.name) == spec:
            continue
        try:
            pool.add(spec)
        except (Refusal, ConfigError) as exc:
            logger.warning("instance %s is not added: %s", spec.name, exc)
        else:
            pool.on_declared(spec.name)
    for name in todo.leave:
        try:
            pool.drain(name, then_remove=True).is_withdrawn = True
        except Refusal as exc:
            logger.warning("instance %s is not removed: %s", name, exc)


def specs_of(document: PoolFile, source: str) -> list[InstanceSpec]:
    """The instances of a pool file."""
    specs = _specs_of_model(document, document.aliases, source)
    for name, model in document.models.items():
        specs += _specs_of_model(model, (name, *model.aliases), source)
    return specs


def _specs_of_model(
    model: PoolFileModel, names: tuple[str, ...], source: str
) -> list[InstanceSpec]:
    lists = ((Role.PREFILL, model.prefill), (Role.DECODE, model.decode), (Role.BOTH, model.both))
    specs = []
    for role, items in lists:
        for item in items:
            if isinstance(item, str):
                entry = PoolFileEntry(item)
            else:
                entry = msgspec.convert(item, PoolFileEntry)
            specs.append(
                InstanceSpec(
                    Origin.parse(entry.url),
                    role,
                    entry.emits_first_token,
                    entry.recomputes,
                    entry.bootstrap_port,
                    entry.kv_events_port,
                    entry.kv_events_replay_port,
                    tuple(parse_store_events(each) for each in entry.store_kv_events),
                    source,
                    names,
                    entry.data_parallel_size,
                )
            )
    return specs
