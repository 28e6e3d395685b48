"""The delay until both sides cancel a request after a client disconnect."""

from __future__ import annotations

import pytest
import uvloop
from support.figures import Figure, record
from support.proxy_fakes_leaving import STAGES, leave


@pytest.mark.parametrize(("flow", "stage", "counted_as"), STAGES)
def test_both_sides_cancel_within_100_ms(benchmark, flow: str, stage: str, counted_as: str) -> None:
    took = []
    benchmark.pedantic(
        lambda: took.append(uvloop.run(leave(flow, stage, counted_as))), rounds=5, warmup_rounds=1
    )
    record(
        benchmark,
        Figure(f"proxy: leaving, {flow}, {stage}", max(took), 0.1, "s", at_least=False),
    )
