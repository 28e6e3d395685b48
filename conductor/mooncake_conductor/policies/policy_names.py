"""Registry of the prefill policies by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mooncake_conductor.errors import ConductorConfigError
from mooncake_conductor.index.chunk_index import ChunkIndex
from mooncake_conductor.policies.cost_policy import CostPolicy
from mooncake_conductor.policies.heat import CacheReports, HeatMeter
from mooncake_conductor.policies.load_policies import (
    CacheLocalPolicy,
    DynamoPolicy,
    LeastLoadedPolicy,
    LMetricPolicy,
    PreblePolicy,
    RandomPolicy,
    RoundRobinPolicy,
    SGLangPolicy,
)
from mooncake_conductor.policies.mooncake_policy import Boundary, MooncakePolicy
from mooncake_conductor.policies.situation import PrefillPolicy

DEFAULT_POLICY = "cost"


@dataclass(frozen=True, slots=True)
class PolicyParts:
    """Everything that policies are constructed from.

    Args:
        index: the chunk index.
        heat: request frequency of chunks.
        reports: which chunk each instance would evict next.
        threshold: parameter of ``mooncake``.
        boundary: parameter of ``mooncake``.
    """

    index: ChunkIndex
    heat: HeatMeter
    reports: CacheReports
    threshold: float = 2.0
    boundary: Boundary = Boundary.FAST


POLICIES: dict[str, Callable[[PolicyParts], PrefillPolicy]] = {
    "random": lambda parts: RandomPolicy(),
    "round-robin": lambda parts: RoundRobinPolicy(),
    "least-loaded": lambda parts: LeastLoadedPolicy(),
    "cache-local": lambda parts: CacheLocalPolicy(),
    "mooncake": lambda parts: MooncakePolicy(parts.threshold, parts.boundary),
    "cost": lambda parts: CostPolicy(parts.heat, parts.reports, parts.index.num_copies),
    "lmetric": lambda parts: LMetricPolicy(),
    "dynamo": lambda parts: DynamoPolicy(),
    "sglang": lambda parts: SGLangPolicy(parts.index.num_held),
    "preble": lambda parts: PreblePolicy(),
}


def make_policy(name: str, parts: PolicyParts) -> PrefillPolicy:
    """Create the policy with this name.

    Raises:
        ConductorConfigError: there is none; the error lists the known names.
    """
    if name not in POLICIES:
        raise ConductorConfigError(f"no policy {name!r}: there are {', '.join(POLICIES)}")
    return POLICIES[name](parts)
