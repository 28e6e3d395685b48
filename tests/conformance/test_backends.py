"""The conformance suite over every installed backend; a skip names why a backend is unavailable."""

from __future__ import annotations

import pytest
import torch

from mooncake_hal.backend import Backend
from mooncake_hal.registry import PluginStatus, Registry, TableRow
from mooncake_hal.testing.backends import BackendBasics, BackendConformance, load_backend

REGISTRY = Registry.discover()
TABLE = REGISTRY.backend_table()
AVAILABLE = [row.name for row in TABLE if row.status is PluginStatus.AVAILABLE]


class TestComputing(BackendConformance):
    # these compute no values on purpose: their results have shapes, but no numbers to compare
    @pytest.fixture(params=[name for name in AVAILABLE if name not in ("null", "paced")])
    def backend(self, request: pytest.FixtureRequest) -> Backend:
        return load_backend(request.param)


class TestNull(BackendBasics):
    backend_name = "null"


class TestPaced(BackendBasics):
    backend_name = "paced"

    def test_graphs_as_promised(self, backend: Backend) -> None:
        """Its graphs take time, as ``tests/unit/hal/null`` measures, but replay no computation."""
        x = torch.zeros(4)
        graph = backend.runtime.capture(lambda: x.add_(1))
        graph.replay()
        assert x.eq(1).all()


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)
def test_availability(row: TableRow) -> None:
    """Reports each unavailable backend as a skip."""
    if row.status is PluginStatus.UNAVAILABLE:
        pytest.skip(f"backend {row.name} is unavailable: {row.reason}")
    assert row.status is PluginStatus.AVAILABLE, row.reason


def test_every_backend_of_this_repository_is_installed() -> None:
    """Without this check, a missing backend would shrink the suite silently."""
    assert set(REGISTRY.backends) >= {"ascend", "cpu", "cuda", "null"}, REGISTRY.not_loaded
