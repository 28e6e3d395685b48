"""Checks whether a P and a D can exchange KV, by the topologies that they publish (`/kv/topology`).

The rules and inputs are those of the instances' handshake, so that an incompatible pair is known as
soon as an instance joins, not at its first request. Facts that are not published are ignored here:
the handshake makes the final decision.
"""

from __future__ import annotations

import msgspec
from msgspec import Struct
from msgspec.structs import replace


class TransportRules(Struct, frozen=True):
    """Constraints of a transport on its two ends."""

    same_backend: bool = False
    same_generation: bool = False
    any_tp_ratio: bool = True
    # What the endpoints speak; they need one in common.
    variants: tuple[str, ...] = ()


class PairTopology(Struct, frozen=True):
    """The part of an instance's `/kv/topology` that decides about pairs."""

    # Identifies this start of the instance (epoch).
    engine_id: str = ""
    tp_size: int = 1
    backend: str = ""
    generation: str = ""
    transports: dict[str, TransportRules] = {}
    # Values that must be equal on both ends, by name.
    must_match: dict[str, str] = {}
    pp_size: int = 1
    # Whether the instance supports early pulls.
    pulls_early: bool = False
    # Whether D serves all choices of a request from one reservation.
    splits_choices: bool = False
    dp_size: int = 1
    # Short digests of the secrets that it accepts from peers; it proves that it knows the first.
    secret_digests: tuple[str, ...] = ()

    @property
    def num_devices(self) -> int:
        """Number of devices of all ranks."""
        return max(self.dp_size * self.tp_size * self.pp_size, 1)

    def facts(self) -> bytes:
        """Everything but the epoch. If it is equal, instances are compatible with the same peers;
        a field's keys in another order make it differ."""
        return msgspec.json.encode(replace(self, engine_id=""))


def incompatibility_reason(prefill: PairTopology, decode: PairTopology) -> str | None:
    """The reason why the two instances can't exchange KV; None if none is known."""
    mine, others = prefill.secret_digests, decode.secret_digests
    if mine and others and not (mine[0] in others and others[0] in mine):
        return "the deployment's secret differs: give both the same --kv-secret-file"
    for name, ours in prefill.must_match.items():
        theirs = decode.must_match.get(name)
        if theirs is not None and theirs != ours:
            return f"{name} differs: {_short(ours)} and {_short(theirs)}"
    if not prefill.transports or not decode.transports:
        return None
    problems = [
        f"{name}: {_transport_problem(name, prefill, decode)}"
        for name in sorted(prefill.transports.keys() & decode.transports.keys())
        if _transport_problem(name, prefill, decode)
    ]
    common = prefill.transports.keys() & decode.transports.keys()
    if len(problems) < len(common):
        return None
    return "; ".join(problems) or "they have no transport in common"


def _transport_problem(name: str, prefill: PairTopology, decode: PairTopology) -> str | None:
    rules = (prefill.transports[name], decode.transports[name])
    if any(rule.same_backend for rule in rules) and prefill.backend != decode.backend:
        return f"needs one backend, they are {prefill.backend} and {decode.backend}"
    if any(rule.same_generation for rule in rules) and prefill.generation != decode.generation:
        return f"needs one generation, they are {prefill.generation} and {decode.generation}"
    is_multiple = 1 <= decode.tp_size <= prefill.tp_size and prefill.tp_size % decode.tp_size == 0
    if not is_multiple and not all(rule.any_tp_ratio for rule in rules):
        return f"needs P_tp a multiple of D_tp, they are {prefill.tp_size} and {decode.tp_size}"
    ours, theirs = (rule.variants for rule in rules)
    if ours and theirs and not set(ours) & set(theirs):
        return f"needs one release and setting, they are {' or '.join(ours)}; {' or '.join(theirs)}"
    return None


def _short(value: str) -> str:
    return value if len(value) <= 200 else f"{value[:200]}…"
