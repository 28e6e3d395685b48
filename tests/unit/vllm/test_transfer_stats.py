"""The metrics of our connectors on vLLM's /metrics; vLLM itself is stubbed."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from support import vllm_stub

MONITORING = Path(__file__).parents[3] / "deploy" / "monitoring"


@pytest.fixture
def stats(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    vllm_stub.install(monkeypatch)
    return importlib.import_module("mooncake_vllm.transfer_stats")


def test_counters_of_every_engine_begin_at_0(stats: ModuleType) -> None:
    """Prometheus sees no increase in a series that begins with its first event."""
    begun: set[tuple[object, ...]] = set()

    class Metric:
        def __init__(self, name: str, documentation: str, labelnames: list[str], **_: str) -> None:
            self.name = name

        def labels(self, *values: object) -> Any:
            begun.add((self.name, *values))

    kinds = {"counter": Metric, "gauge": Metric}
    for of_pool in (False, True):
        stats.HalPromMetrics(None, kinds, ["engine"], {0: ["a"], 1: ["b"]}, of_pool)
    assert begun == {
        (f"vllm:mooncake_hal_{name}", engine) for name in stats.COUNTERS for engine in "ab"
    }


@pytest.mark.parametrize("file", ["alert-rules.yaml", "grafana-dashboard.json"])
def test_metrics_in_monitoring_files_exist(file: str, stats: ModuleType) -> None:
    known = {*stats.GAUGES, *(f"{name}_total" for name in (*stats.COUNTERS, *stats.BY_TRANSPORT))}
    named = set(re.findall(r"\bvllm:mooncake_hal_(\w+)", (MONITORING / file).read_text()))
    assert len(named) >= 8
    assert named <= known
