"""The choices of other routers for the same requests, replayed on the same cluster."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.conductor_traces import write_trace
from support.figures import Figure, record

from mooncake_conductor.conductor import ConductorSettings
from mooncake_conductor.cost.latency_model import cold_start
from mooncake_conductor.simulator.results import summarise
from mooncake_conductor.simulator.simulation import Cluster, Simulation
from mooncake_conductor.simulator.trace_file import read_trace
from mooncake_conductor.slo_admission import Objective

CLUSTER = Cluster(
    4, 4, cold_start("llama-3-70b", "A800", 8), cache_tokens=1_000_000, link_gb_s=12.5
)


def mean_ttft(path: Path, policy: str) -> float:
    result = Simulation(CLUSTER, ConductorSettings(policy)).run(read_trace(path))
    return summarise(result, Objective()).mean_ttft


@pytest.mark.parametrize("policy", ["sglang", "dynamo"])
def test_cost_policy_against(policy: str, benchmark, tmp_path: Path) -> None:
    path = write_trace(tmp_path / "trace.jsonl", 1500, 1.0)
    theirs = mean_ttft(path, policy)
    ours = benchmark.pedantic(mean_ttft, args=(path, "cost"), rounds=1)
    name = f"conductor: mean TTFT with cost, beside the choices of {policy}"
    record(benchmark, Figure(name, ours, theirs, "s", at_least=False))
