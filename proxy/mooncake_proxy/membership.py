"""Who belongs to the fleet: changes as data, and what a source wants against what is there."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import msgspec
from msgspec import Struct

from mooncake_proxy.errors import ConfigError
from mooncake_proxy.http1.origin import Origin
from mooncake_proxy.instances import Fleet, Instance, InstanceSpec, Role


class Operation(Enum):
    """What can be done to an instance."""

    ADD = "add"
    DRAIN = "drain"
    RESUME = "resume"
    REMOVE = "remove"
    ROLE = "role"


class Change(Struct, forbid_unknown_fields=True):
    """One change, as the admin API takes it and as workers tell each other.

    `drain` with `remove` forgets the instance when it has finished what runs on it.
    """

    operation: Operation
    url: str
    role: Role | None = None
    emits_first_token: bool = False
    recomputes: bool = False
    bootstrap_port: int | None = None
    remove: bool = False
    source: str = "api"


class Entry(Struct, forbid_unknown_fields=True):
    """An instance in a pool file; a bare URL is the short form."""

    url: str
    emits_first_token: bool = False
    recomputes: bool = False
    bootstrap_port: int | None = None


class PoolFile(Struct, forbid_unknown_fields=True):
    """What a pool file may say."""

    prefill: list[str | dict[str, Any]] = []
    decode: list[str | dict[str, Any]] = []
    both: list[str | dict[str, Any]] = []


@dataclass(frozen=True, slots=True)
class Plan:
    """What has to happen so that a source gets what it wants."""

    add: tuple[InstanceSpec, ...]
    leave: tuple[str, ...]


def apply(fleet: Fleet, change: Change) -> Instance | None:
    """Do it. NotFound and Conflict say why not; None when the instance is gone afterwards."""
    name = str(Origin.parse(change.url))
    if change.operation is Operation.ADD:
        return fleet.add(spec_of(change))
    if change.operation is Operation.DRAIN:
        return fleet.drain(name, then_remove=change.remove)
    if change.operation is Operation.RESUME:
        return fleet.resume(name)
    if change.operation is Operation.ROLE:
        if change.role is None:
            raise ConfigError("a role switch names its role: prefill, decode or both")
        return fleet.switch_role(name, change.role)
    fleet.remove(name)
    return None


def spec_of(change: Change) -> InstanceSpec:
    """The instance that an ADD describes."""
    if change.role is None:
        raise ConfigError(f"instance {change.url}: its role is missing (prefill, decode or both)")
    return InstanceSpec(
        Origin.parse(change.url),
        change.role,
        change.emits_first_token,
        change.recomputes,
        change.bootstrap_port,
        change.source,
    )


def plan(wanted: Sequence[InstanceSpec], present: Iterable[InstanceSpec], source: str) -> Plan:
    """What to add and what to drain away; instances of other sources are left alone."""
    mine = {spec.name: spec for spec in present if spec.source == source}
    names = {spec.name for spec in wanted}
    new = tuple(spec for spec in wanted if mine.get(spec.name) != spec)
    return Plan(new, tuple(name for name in mine if name not in names))


def carry_out(fleet: Fleet, todo: Plan) -> None:
    """Add at once; drain what leaves, so that what runs there is finished."""
    for spec in todo.add:
        fleet.add(spec)
    for name in todo.leave:
        fleet.drain(name, then_remove=True)


def specs_of(document: PoolFile, source: str) -> list[InstanceSpec]:
    """The instances of a pool file."""
    lists = ((Role.PREFILL, document.prefill), (Role.DECODE, document.decode))
    specs = []
    for role, items in (*lists, (Role.BOTH, document.both)):
        for item in items:
            entry = Entry(item) if isinstance(item, str) else msgspec.convert(item, Entry)
            specs.append(
                InstanceSpec(
                    Origin.parse(entry.url),
                    role,
                    entry.emits_first_token,
                    entry.recomputes,
                    entry.bootstrap_port,
                    source,
                )
            )
    return specs
