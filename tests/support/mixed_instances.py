"""Instances that serve one cell after another, so that each starts once and not once per cell."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from support.mixed_fleet import START_S, Side
from support.pd_processes import Served
from support.programs import Program

Sides = tuple[Side, Side]
Start = Callable[[str, Side], Program]
"""Starts an instance of a role without waiting until it is ready."""

MOST_RANKS = 13
"""Ranks that run at once: P and D with 1, 2, and 4 or 3 ranks, about 6 GB."""


@dataclass(frozen=True)
class Instance:
    """An instance that may serve several cells."""

    role: str
    side: Side


def instances_of(cell: Sides) -> tuple[Instance, Instance]:
    """A cell's P and D."""
    return Instance("prefill", cell[0]), Instance("decode", cell[1])


def in_sharing_order(pairs: Sequence[Sides]) -> list[Sides]:
    """Order pairs such that consecutive ones share a side where possible."""

    def shares(one: Sides, other: Sides) -> bool:
        return one[0] == other[0] or one[1] == other[1]

    left, ordered = list(pairs), list[Sides]()
    while left:
        near = [pair for pair in left if ordered and shares(pair, ordered[-1])]
        # begin with the pair that has the fewest partners: the end of a chain
        found = min(near or left, key=lambda pair: sum(shares(pair, each) for each in left))
        left.remove(found)
        ordered.append(found)
    return ordered


class InstancePool:
    """Starts a cell's and the next cell's instances, and stops those that are needed last or never.

    Args:
        start: starts one instance.
        cells: all cells, in order.
        most_ranks: that run at once, unless a single cell needs more.
    """

    def __init__(self, start: Start, cells: Sequence[Sides], most_ranks: int = MOST_RANKS) -> None:
        self._start = start
        self._cells = cells
        self._most_ranks = most_ranks
        self._programs: dict[Instance, Program] = {}
        self._served: dict[Instance, Served] = {}

    async def serve(self, number: int) -> tuple[Served, Served]:
        """The ready P and D of a cell. Call in the order of the cells."""
        for instance in list(self._programs):
            if self._next_use(instance, number) == math.inf:
                self._end(instance)
        needed = instances_of(self._cells[number])
        for instance in needed:
            self._run(instance, number, needed)
        if number + 1 < len(self._cells):
            ahead = instances_of(self._cells[number + 1])
            for instance in ahead:
                self._run(instance, number, (*needed, *ahead))
        prefill, decode = [await self._ready(instance) for instance in needed]
        return prefill, decode

    def drop(self, number: int) -> None:
        """Stop a failed cell's instances, so that later cells get new ones."""
        for instance in instances_of(self._cells[number]):
            self._end(instance)

    def close(self) -> None:
        """Stop all instances."""
        for instance in list(self._programs):
            self._end(instance)

    def _run(self, instance: Instance, number: int, kept: Sequence[Instance]) -> None:
        """Start an instance, and stop those that are needed last to make room. If only ``kept``
        ones are left, the current cell's instance starts anyway, a later cell's does not."""
        if instance in self._programs:
            return
        while self._ranks() + instance.side.tp_size > self._most_ranks:
            others = [each for each in self._programs if each not in kept]
            if not others and instance in instances_of(self._cells[number]):
                break
            if not others:
                return
            self._end(max(others, key=lambda each: self._next_use(each, number)))
        self._programs[instance] = self._start(instance.role, instance.side)

    def _ranks(self) -> int:
        return sum(each.side.tp_size for each in self._programs)

    def _next_use(self, instance: Instance, number: int) -> float:
        later = range(number, len(self._cells))
        uses = (each for each in later if instance in instances_of(self._cells[each]))
        return next(uses, math.inf)

    async def _ready(self, instance: Instance) -> Served:
        if instance not in self._served:
            program = self._programs[instance]
            line = await asyncio.to_thread(program.wait_for, "ready ", START_S)
            self._served[instance] = Served(line.split()[1], program)
        return self._served[instance]

    def _end(self, instance: Instance) -> None:
        self._served.pop(instance, None)
        if (program := self._programs.pop(instance, None)) is not None:
            program.close()
