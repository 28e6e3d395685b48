"""The compatibility rules for a deployment of prefill and decode instances.

``DeploymentPlan.problems`` checks a plan before anything is loaded. ``check_compatibility`` checks
two running instances in the handshake, by the metadata that they *report*, so that a mismatch
between two hand-written configurations is always detected. Every message says what was wanted, what
was found and what to do.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, entry_points

from mooncake_hal.backend import Capabilities
from mooncake_hal.errors import DeploymentRefused
from mooncake_hal.port_range import PortRange, ReservedPorts, reservation_conflict
from mooncake_hal.ports import Port, find_ports_in_use
from mooncake_hal.specs import TransportConstraints

CONNECTOR_GROUP = "mooncake_hal.connectors"
"""Entry points of KV connectors: name to ``module:class``."""

ROLES = ("prefill", "decode", "both")


@dataclass(frozen=True, slots=True)
class Hardware:
    """The hardware of an instance.

    Args:
        backend, generation: names as ``mooncake-hal devices`` prints them.
    """

    backend: str
    generation: str


USUAL_BLOCK_SIZE = 16
"""Preferred tokens per KV block: small enough that partly filled blocks waste little memory."""


@dataclass(frozen=True, slots=True)
class BlockSize:
    """The default block size of an instance that was started without ``--block-size``.

    Args:
        tokens: tokens per KV block.
        reason: why this size was chosen, for logs.
    """

    tokens: int
    reason: str


def usual_block_size(offered: tuple[int, ...]) -> int:
    """USUAL_BLOCK_SIZE if it is offered, otherwise the first, which is the best."""
    return USUAL_BLOCK_SIZE if USUAL_BLOCK_SIZE in offered else offered[0]


def default_block_size(capabilities: Capabilities) -> BlockSize:
    """The backend's only block size, else the usual one, else the backend's best."""
    offered = capabilities.block_sizes
    if len(offered) == 1:
        return BlockSize(offered[0], "the only one that the backend supports")
    if USUAL_BLOCK_SIZE in offered:
        return BlockSize(USUAL_BLOCK_SIZE, "the default")
    return BlockSize(
        offered[0], f"the backend's best; it does not support the default of {USUAL_BLOCK_SIZE}"
    )


@dataclass(frozen=True, slots=True)
class InstanceInfo:
    """The properties of an instance that the compatibility check compares.

    Args:
        hardware: its backend and device generation.
        tp_size: tensor-parallel ranks per pipeline stage.
        block_size: tokens per KV block.
        pp_size: pipeline stages; instances with different numbers are compatible.
        transports: the transports that can move its KV, with their constraints; empty as long as
            they are not known.
    """

    hardware: Hardware
    tp_size: int
    block_size: int
    pp_size: int = 1
    transports: Mapping[str, TransportConstraints] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class InstancePlan:
    """One instance of a deployment plan.

    Args:
        name: for messages.
        role: one of ROLES.
        connector: name of its KV connector; empty if it does not exchange KV.
        ports: every port that any of its ranks binds.
        info: None as long as its hardware is not known.
        reserved: ports that libraries below its transports may take.
        host: the host that it is planned for; empty if that is not known.
    """

    name: str
    role: str
    connector: str = ""
    ports: tuple[Port, ...] = ()
    info: InstanceInfo | None = None
    reserved: tuple[ReservedPorts, ...] = ()
    host: str = ""


@dataclass(frozen=True, slots=True)
class DeploymentPlan:
    """Instances that serve one model together."""

    instances: tuple[InstancePlan, ...]

    def problems(self) -> list[str]:
        """Return every violation in the plan itself; does not inspect this machine."""
        return [
            *self._role_problems(),
            *self._size_problems(),
            *self._connector_problems(),
            *self._port_problems(),
            *self._pair_problems(),
        ]

    def validate(self) -> None:
        """Check the plan, and that its ports on this host are free, by binding all of them at once.

        Raises:
            DeploymentRefused: lists all violations.
        """
        ports = [port for instance in self.instances for port in instance.ports]
        by_address = {(port.host, port.number or index): port for index, port in enumerate(ports)}
        found = self.problems() + find_ports_in_use(list(by_address.values()))
        if found:
            raise DeploymentRefused(found)

    def pairs(self) -> Iterator[tuple[InstancePlan, InstancePlan]]:
        """All pairs of a prefill and a decode instance whose hardware is known."""
        known = [instance for instance in self.instances if instance.info is not None]
        prefills = [instance for instance in known if instance.role == "prefill"]
        decodes = [instance for instance in known if instance.role == "decode"]
        return itertools.product(prefills, decodes)

    def _role_problems(self) -> Iterator[str]:
        counts = Counter(instance.role for instance in self.instances)
        for instance in self.instances:
            if instance.role not in ROLES:
                yield f"{instance.name}: role {instance.role!r} is not known; use one of {ROLES}"
        if counts["prefill"] and not counts["decode"] and not counts["both"]:
            yield f"{counts['prefill']} prefill instances and no decode instance; add at least one"
        if counts["decode"] and not counts["prefill"] and not counts["both"]:
            yield f"{counts['decode']} decode instances and no prefill instance; add at least one"

    def _size_problems(self) -> Iterator[str]:
        for instance in self.instances:
            info = instance.info
            if info is not None and min(info.tp_size, info.pp_size, info.block_size) < 1:
                yield (
                    f"{instance.name}: tensor-parallel size {info.tp_size}, {info.pp_size} "
                    f"pipeline stages, KV blocks of {info.block_size} tokens: each must be 1 or "
                    "more"
                )

    def _connector_problems(self) -> Iterator[str]:
        known = {point.name: point for point in entry_points(group=CONNECTOR_GROUP)}
        for instance in self.instances:
            if instance.role != "both" and not instance.connector:
                yield f"{instance.name}: role {instance.role!r} needs a KV connector"
            if instance.connector:
                problem = _connector_problem(instance.connector, known)
                if problem:
                    yield f"{instance.name}: {problem}"
        names = {instance.connector for instance in self.instances if instance.connector}
        if len(names) > 1:
            yield f"instances have different KV connectors, {sorted(names)}; choose one"

    def _port_problems(self) -> Iterator[str]:
        users: defaultdict[tuple[str, int], list[str]] = defaultdict(list)
        for instance in self.instances:
            for port in instance.ports:
                if port.number:
                    users[port.host, port.number].append(f"{instance.name} ({port.what})")
        for (host, number), names in users.items():
            if len(names) > 1:
                yield f"port {number} on {host} is planned for {' and '.join(names)}"
        for instance in self.instances:
            for port in instance.ports:
                wanted = PortRange(port.number, port.number) if port.number else None
                problem = wanted and reservation_conflict(port.what, wanted, instance.reserved)
                if problem:
                    yield f"{instance.name}: {problem}"

    def _pair_problems(self) -> Iterator[str]:
        for prefill, decode in self.pairs():
            assert prefill.info is not None
            assert decode.info is not None
            for problem in find_incompatibilities(prefill.info, decode.info):
                yield f"{prefill.name} and {decode.name}: {problem}"


def check_compatibility(prefill: InstanceInfo, decode: InstanceInfo) -> tuple[str, ...]:
    """Check that a prefill and a decode instance can exchange KV.

    Returns:
        Their ``usable_transports``.

    Raises:
        DeploymentRefused: lists the incompatibilities, with both values.
    """
    problems = find_incompatibilities(prefill, decode)
    if problems:
        raise DeploymentRefused(problems)
    return usable_transports(prefill, decode)


def find_incompatibilities(prefill: InstanceInfo, decode: InstanceInfo) -> list[str]:
    """Return why no transport can serve the pair; empty if one can.

    Backends, device generations, block sizes and the numbers of ranks and pipeline stages may
    differ, unless the transports' constraints say otherwise.
    """
    if usable_transports(prefill, decode) or not (prefill.transports and decode.transports):
        return []
    return [
        f"{name}: {problem}"
        for name, problems in transport_problems(prefill, decode).items()
        for problem in problems
    ]


def usable_transports(prefill: InstanceInfo, decode: InstanceInfo) -> tuple[str, ...]:
    """Names of the transports that both instances have and whose constraints the pair satisfies."""
    found = transport_problems(prefill, decode)
    return tuple(name for name, problems in found.items() if not problems)


def transport_problems(prefill: InstanceInfo, decode: InstanceInfo) -> dict[str, list[str]]:
    """Return, for each transport of either instance, why it can't serve the pair; an empty list if
    it can."""
    names = sorted(set(prefill.transports) | set(decode.transports))
    return {name: _transport_problems(name, prefill, decode) for name in names}


def _transport_problems(name: str, prefill: InstanceInfo, decode: InstanceInfo) -> list[str]:
    """Return why a transport can't serve this pair, with both values; both ends' constraints
    apply."""
    for role, instance in (("prefill", prefill), ("decode", decode)):
        if name not in instance.transports:
            offered = ", ".join(sorted(instance.transports))
            return [f"the {role} instance does not offer it; it offers {offered}"]
    rules = (prefill.transports[name], decode.transports[name])
    mine, theirs = prefill.hardware, decode.hardware
    problems = []
    if any(rule.same_backend for rule in rules) and mine.backend != theirs.backend:
        problems.append(
            f"it needs the same backend on both sides, but prefill runs {mine.backend!r} and "
            f"decode {theirs.backend!r}"
        )
    if any(rule.same_generation for rule in rules) and mine.generation != theirs.generation:
        problems.append(
            f"it needs the same device generation on both sides, but prefill has "
            f"{mine.generation!r} and decode {theirs.generation!r}"
        )
    is_multiple = 1 <= decode.tp_size <= prefill.tp_size and prefill.tp_size % decode.tp_size == 0
    if not is_multiple and not all(rule.any_tp_ratio for rule in rules):
        problems.append(
            f"it needs a tensor-parallel size of prefill that is a multiple of decode's, but "
            f"they are {prefill.tp_size} and {decode.tp_size}"
        )
    ours, others = (rule.variants for rule in rules)
    if ours and others and not set(ours) & set(others):
        problems.append(
            f"prefill speaks {' or '.join(ours)}, but decode {' or '.join(others)}: run one "
            "release with the same settings on both"
        )
    return problems


def _connector_problem(name: str, known: dict[str, EntryPoint]) -> str | None:
    if name not in known:
        offered = ", ".join(sorted(known)) or "none; install mooncake-engine"
        return f"KV connector {name!r} is not known; known are {offered}"
    try:
        known[name].load()
    except Exception as exc:  # noqa: BLE001  # a plugin's import may raise anything; it is reported
        return f"KV connector {name!r} can't be loaded from {known[name].value}: {exc!r}"
    return None
