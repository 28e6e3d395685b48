"""Cells of a mixed grid share their instances: each is started once, within a limit of running
ranks."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, replace
from typing import cast

import pytest
from support.mixed_fleet import Side
from support.mixed_instances import MOST_RANKS, Instance, InstancePool, Sides, in_sharing_order
from support.programs import Program

ROWS = [
    (Side("cpu", 16), Side("cuda", 128)),
    (Side("cpu", 128), Side("cuda", 16)),
    (Side("cpu", 16), Side("npu", 128)),
    (Side("cuda", 16), Side("cpu", 128)),
    (Side("cuda", 128), Side("cpu", 16)),
    (Side("cuda", 16), Side("npu", 128)),
    (Side("npu", 128), Side("cpu", 16)),
    (Side("npu", 128), Side("cuda", 16)),
]
RATIOS = ((2, 3), (2, 1), (1, 1), (1, 2), (4, 2))


@dataclass
class Starts:
    """Records which instances were started, how often, and which are running."""

    counts: Counter[Instance]
    running: dict[Instance, int]
    most_ranks: int = 0

    def start(self, role: str, side: Side) -> Program:
        instance = Instance(role, side)
        self.counts[instance] += 1
        self.running[instance] = side.tp_size
        self.most_ranks = max(self.most_ranks, sum(self.running.values()))
        return cast("Program", FakeProgram(self, instance))


@dataclass
class FakeProgram:
    """A program that is ready at once."""

    starts: Starts
    instance: Instance

    def wait_for(self, words: str, timeout_s: float) -> str:
        return (
            f"ready http://{self.instance.role}-{self.instance.side}-{self.instance.side.tp_size}"
        )

    def close(self) -> None:
        del self.starts.running[self.instance]


def grid() -> list[Sides]:
    return [
        (replace(p, tp_size=first), replace(d, tp_size=second))
        for p, d in in_sharing_order(ROWS)
        for first, second in RATIOS
    ]


@pytest.mark.parametrize(("most_ranks", "starts_once"), [(MOST_RANKS, True), (8, False)])
def test_instances_are_started_once_within_rank_limit(most_ranks: int, starts_once: bool) -> None:
    cells, starts = grid(), Starts(Counter(), {})
    pool = InstancePool(starts.start, cells, most_ranks)

    async def main() -> None:
        for number, (p, d) in enumerate(cells):
            pair = await pool.serve(number)
            found = [each.url for each in pair]
            assert found == [
                f"http://prefill-{p}-{p.tp_size}",
                f"http://decode-{d}-{d.tp_size}",
            ]

    asyncio.run(main())
    assert starts.most_ranks <= most_ranks
    assert (set(starts.counts.values()) == {1}) == starts_once
    assert len(starts.counts) == 30
    pool.close()
    assert not starts.running


def test_cell_after_failure_gets_fresh_instances() -> None:
    cells, starts = grid()[:2], Starts(Counter(), {})
    pool = InstancePool(starts.start, cells)
    asyncio.run(pool.serve(0))
    pool.drop(0)
    asyncio.run(pool.serve(1))
    assert starts.counts[Instance("prefill", cells[0][0])] == 2
