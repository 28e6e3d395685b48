"""Complete serving systems on the same number of nodes, to compare their goodput over load."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from mooncake_conductor.conductor import ConductorSettings
from mooncake_conductor.simulator.coupled_instances import WHOLE_PROMPTS, CoupledSimulation
from mooncake_conductor.simulator.results import RunSummary, summarise
from mooncake_conductor.simulator.simulation import Cluster, Simulation, SimulationResult
from mooncake_conductor.simulator.trace_file import TraceRequest
from mooncake_conductor.slo_admission import AdmissionMode, Objective, Objectives

Progress = Callable[[float], None]
_CHUNKED_TOKENS = 512
"""Prompt tokens per step: the largest round number whose step takes under 100 ms on eight A800."""


def _conductor(
    cluster: Cluster, wanted: Objective, requests: Sequence[TraceRequest], progress: Progress | None
) -> SimulationResult:
    settings = ConductorSettings("cost", AdmissionMode.PREDICTIVE, Objectives(wanted))
    return Simulation(cluster, settings).run(requests, progress)


def _static(
    cluster: Cluster, wanted: Objective, requests: Sequence[TraceRequest], progress: Progress | None
) -> SimulationResult:
    """DistServe: no reuse, shortest queue, and the decode node is chosen after the prefill."""
    settings = ConductorSettings("least-loaded", binds_late=True)
    return Simulation(replace(cluster, cache_tokens=0), settings).run(requests, progress)


def _chunked(
    cluster: Cluster, wanted: Objective, requests: Sequence[TraceRequest], progress: Progress | None
) -> SimulationResult:
    return CoupledSimulation(cluster, _CHUNKED_TOKENS).run(requests, progress)


def _whole(
    cluster: Cluster, wanted: Objective, requests: Sequence[TraceRequest], progress: Progress | None
) -> SimulationResult:
    return CoupledSimulation(cluster, WHOLE_PROMPTS).run(requests, progress)


SYSTEMS = {
    "conductor": _conductor,
    "coupled-chunked": _chunked,
    "coupled": _whole,
    "static": _static,
}
"""``conductor``: policy ``cost`` with predictive admission. ``coupled``: as vLLM without PD, with
whole prompts per step; ``coupled-chunked``: with chunked prefill. ``static``: as DistServe."""


def serve(
    system: str,
    cluster: Cluster,
    wanted: Objective,
    requests: Sequence[TraceRequest],
    progress: Progress | None = None,
) -> RunSummary:
    """Simulate one system on a trace, and summarise the run."""
    return summarise(SYSTEMS[system](cluster, wanted, requests, progress), wanted)
