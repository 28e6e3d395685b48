"""Runs attacks against a deployment under ordinary load, one after another or mixed."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from support.abuse.attack import Attack, Running
from support.abuse.background_traffic import BackgroundTraffic, Case, make_cases
from support.abuse.deployment import Deployment, PeakMemory, ResidentMemory, deployment
from support.abuse.verdicts import Bounds, Largest, Outcome

POLL_S = 0.05
MIXED = 3
"""Concurrent attacks in a soak."""
IDLE_S = 60.0
HELD_MIB = 256
"""MiB that a process may keep after all attacks: memory that its allocator does not return."""
Report = Callable[[Outcome], None]


@dataclass(frozen=True, slots=True)
class Plan:
    """Settings shared by all attacks.

    Args:
        seconds: duration of each attack.
        seed: of all random choices.
        slack: factor on timeouts relative to a quiet machine.
        scratch: folder for logs.
    """

    seconds: float
    seed: int
    slack: float
    scratch: Path


class AttackedDeployment:
    """A deployment that starts at its first attack, and restarts after it has lost a process."""

    def __init__(self, connector: str, plan: Plan) -> None:
        self._connector = connector
        self._plan = plan
        self._stack = ExitStack()
        self._running: tuple[Deployment, list[Case]] | None = None
        self.began_with = ResidentMemory({})

    def __enter__(self) -> AttackedDeployment:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def ready(self) -> tuple[Deployment, list[Case]]:
        """The complete deployment, and the cases to ask it."""
        if self._running is not None and self._running[0].lost():
            self._stack.close()
            self._running = None
        if self._running is None:
            opened = deployment(self._connector, self._plan.scratch, self._plan.slack)
            started = self._stack.enter_context(opened)
            cases = asyncio.run(make_cases(started.target))
            asyncio.run(_warm_up(started, cases))
            self._running = started, cases
            self.began_with = ResidentMemory(started.pids())
        return self._running


async def _warm_up(started: Deployment, cases: Sequence[Case]) -> None:
    """Send ordinary requests, so that one-time allocations don't count as growth."""
    async with BackgroundTraffic(started.target, cases).around():
        await asyncio.sleep(2.0)


def run_each(attacks: Sequence[Attack], plan: Plan, report: Report) -> list[Outcome]:
    """Run the attacks one after another, grouped by the kind of deployment."""
    outcomes = []
    for connector in sorted({attack.connectors[0] for attack in attacks}):
        with AttackedDeployment(connector, plan) as attacked:
            for attack in attacks:
                if attack.connectors[0] == connector:
                    outcomes.append(attack_once([attack], plan.seconds, attacked, plan))
                    report(outcomes[-1])
            outcomes.append(afterwards(connector, attacked))
            report(outcomes[-1])
    return outcomes


def soak(attacks: Sequence[Attack], minutes: float, plan: Plan, report: Report) -> list[Outcome]:
    """Run several attacks at once, another selection in every round, until the time is over."""
    numbers = random.Random(plan.seed)
    outcomes, ends = [], time.monotonic() + 60 * minutes
    with ExitStack() as stack:
        connectors = sorted({attack.connectors[0] for attack in attacks})
        deployments = {
            name: stack.enter_context(AttackedDeployment(name, plan)) for name in connectors
        }
        for connector in itertools.cycle(connectors):
            if time.monotonic() > ends:
                break
            able = [attack for attack in attacks if connector in attack.connectors]
            mixed = numbers.sample(able, min(MIXED, len(able)))
            outcomes.append(attack_once(mixed, plan.seconds, deployments[connector], plan))
            report(outcomes[-1])
        for connector, attacked in deployments.items():
            outcomes.append(afterwards(connector, attacked))
            report(outcomes[-1])
    return outcomes


def attack_once(
    attacks: Sequence[Attack], seconds: float, attacked: AttackedDeployment, plan: Plan
) -> Outcome:
    """Run attacks at once, with background traffic; returns the outcome."""
    running, cases = attacked.ready()
    target = running.target
    stopped = tuple(name for attack in attacks for name in attack.stops)
    traffic = BackgroundTraffic(target, cases, stopped)
    memory = PeakMemory(running.pids())
    attacking = [Running(attack, target, seconds, plan.seed) for attack in attacks]
    try:
        asyncio.run(_watch(attacking, traffic))
        complaints = [about for each in attacking for about in each.finish()]
    finally:
        for each in attacking:
            each.kill()
    bounds = [attack.bounds for attack in attacks]
    return Outcome(
        "+".join(attack.name for attack in attacks),
        sum(each.tries for each in attacking),
        running.lost(),
        traffic.right,
        tuple(traffic.wrong),
        tuple(traffic.unanswered),
        _largest(memory.growth_mib()),
        traffic.silence_s,
        tuple(complaints),
        _together(bounds).slacken(plan.slack),
    )


def afterwards(connector: str, attacked: AttackedDeployment) -> Outcome:
    """The deployment's state after all attacks: complete, with the same answers as before, and with
    all blocks and memory released."""
    running, cases = attacked.ready()
    traffic = BackgroundTraffic(running.target, cases)
    complaints = asyncio.run(_settle(running, traffic))
    return Outcome(
        f"afterwards, {connector}",
        len(cases),
        running.lost(),
        traffic.right,
        tuple(traffic.wrong),
        tuple(traffic.unanswered),
        _largest(attacked.began_with.growth_mib()),
        traffic.silence_s,
        tuple(complaints),
        Bounds(growth_mib=HELD_MIB).slacken(running.target.slack),
    )


async def _settle(running: Deployment, traffic: BackgroundTraffic) -> list[str]:
    from support.pd_processes import Served  # imports torch, which not every attacker needs

    complaints = []
    async with traffic.around():
        pass
    for name, url in traffic.urls().items():
        if name != "proxy":
            try:
                await Served(url, running.programs[name]).wait_until_idle(IDLE_S)
            except AssertionError as exc:
                complaints.append(f"{name}: {exc}")
    return complaints


async def _watch(attacking: Sequence[Running], traffic: BackgroundTraffic) -> None:
    async with traffic.around():
        while not all(each.is_over for each in attacking):  # noqa: ASYNC110  # no event to wait for
            await asyncio.sleep(POLL_S)


def _together(bounds: Sequence[Bounds]) -> Bounds:
    """Bounds of several attacks at once: the sums of their bounds."""
    return Bounds(
        sum(each.growth_mib for each in bounds),
        sum(each.silence_s for each in bounds),
        sum(each.unanswered for each in bounds),
    )


def _largest(growth_mib: dict[str, float]) -> Largest:
    found = Largest()
    for name, mib in growth_mib.items():
        found = found.or_larger(mib, name)
    return found
