"""The delay until both sides cancel a request after a client disconnect."""

from __future__ import annotations

import pytest
import uvloop
from support.figures import Figure, record
from support.proxy_fakes_disconnects import STAGES, disconnect


@pytest.mark.parametrize(("flow", "stage", "counted_as"), STAGES)
def test_both_sides_cancel_within_100_ms(benchmark, flow: str, stage: str, counted_as: str) -> None:
    elapsed = []
    benchmark.pedantic(
        lambda: elapsed.append(uvloop.run(disconnect(flow, stage, counted_as))),
        rounds=5,
        warmup_rounds=1,
    )
    record(
        benchmark,
        Figure(f"proxy: leaving, {flow}, {stage}", max(elapsed), 0.1, "s", at_least=False),
    )
