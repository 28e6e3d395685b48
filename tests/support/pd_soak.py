"""A soak test: many requests over two instances of each role, under random faults of every kind.

One instance of each role is in this process, where its block accounting can be checked, behind
relays that lose, duplicate and delay messages. The other one is a process of its own that is killed
now and then and restarted on the same ports.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import httpx
from support.metaserver import Metaserver
from support.pd import (
    GREEDY,
    ORDER,
    Answer,
    ask,
    instance,
    prompt_of,
)
from support.pd_relay import deliver, unreliable
from support.pd_soak_fleet import (
    LEASE_S,
    TRANSFER_TIMEOUT_S,
    Case,
    LocalInstance,
    RemoteInstance,
    SoakFleet,
    SoakInstance,
    soak_fleet,
)
from support.pd_transport import GATE
from support.push import LAYERWISE

from mooncake_engine.errors import EngineError
from mooncake_engine.messages import FinishReason
from mooncake_kv.params import KVTransferDict

DEADLINE_S = 60.0
"""A request without an answer or an error after this time counts as hung."""
WORKERS = 12
NUM_CASES = 40
NUM_CHOICES = 3
"""Of one case in four, which then are sent together half of the time."""
CHOICES_APART_S = 0.05
"""Choices reach the decode instance one by one, as those of a client's request do."""
REPORT_EVERY = 500
FATES = {
    "none": 70,
    "abandoned": 5,
    "aborted": 4,
    "late": 4,
    "left during prefill": 5,
    "left during decode": 10,
    "malformed": 2,
}


@dataclass(frozen=True)
class Plan:
    """Configuration of a soak.

    Args:
        connector: of all instances.
        num_requests: how many requests to send.
        seed: of all random choices.
        with_kills: kill and restart the instances in other processes.
        pulls_early: D reserves blocks and P is sent after it, as with a push, but D reads the KV.
    """

    connector: str
    num_requests: int
    seed: int
    with_kills: bool = True
    pulls_early: bool = False


@dataclass
class Tally:
    """The results of a soak."""

    requests: int = 0
    right: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    hangs: list[str] = field(default_factory=list)
    leaked: list[str] = field(default_factory=list)
    early_bytes: int = 0
    """Bytes that this process' decode instance has read while prompts were being computed."""

    @property
    def is_good(self) -> bool:
        """Whether no answer was wrong, no request hung and nothing leaked."""
        return not (self.wrong or self.hangs or self.leaked)


class Soak:
    """Sends requests, injects faults and counts the results.

    Args:
        over: the instances.
        cases: requests with their expected answers.
        seed: of all random choices.
        with_kills: kill and restart the instances in other processes.
    """

    def __init__(
        self, over: SoakFleet, cases: Sequence[Case], seed: int, *, with_kills: bool
    ) -> None:
        self.tally = Tally()
        self._over = over
        self._cases = cases
        self._numbers = random.Random(seed)
        self._with_kills = with_kills
        self._keys = itertools.count()
        self._sent: dict[str, tuple[Case, str]] = {}
        self._metaserver = Metaserver(self._dispatch)
        self._metaserver.is_failure_expected = True

    async def run(self, num_requests: int) -> Tally:
        """Send that many requests, WORKERS at a time; then check that everything is released."""
        GATE.chaos = random.Random(self._numbers.random())
        self._over.relay.delivery = unreliable(self._numbers.randrange(1 << 30))
        todo = iter(range(num_requests))
        await self._metaserver.start()
        killing = asyncio.create_task(self._kill_now_and_then())
        await asyncio.gather(*(self._work(todo) for _ in range(WORKERS)))
        killing.cancel()
        with suppress(asyncio.CancelledError):
            await killing
        await self._metaserver.close()
        GATE.chaos = None
        self._over.relay.delivery = deliver
        await self._settle()
        self.tally.faults["transfers broken in this process"] = GATE.num_chaotic
        figures = self._over.decode[0].instance.engine.stats().kv_transfer
        self.tally.early_bytes = int(figures.get("bytes_received_early", 0))
        return self.tally

    async def _work(self, todo: Iterator[int]) -> None:
        for _ in todo:
            await self._one()

    async def _one(self) -> None:
        case = self._numbers.choice(self._cases)
        second = self._choose(self._over.decode)
        choices = [each for each in self._cases if each.prompt == case.prompt]
        if len(choices) == 1 or self._numbers.random() < 0.5:
            await self._ask(case, second)
            return
        group = f"choices {next(self._keys)}"
        await asyncio.gather(*(self._ask(choice, second, group) for choice in choices))

    async def _ask(self, case: Case, second: SoakInstance, group: str | None = None) -> None:
        [fate] = self._numbers.choices(list(FATES), list(FATES.values()))
        self.tally.requests += 1
        if not self.tally.requests % REPORT_EVERY:
            print(f"{self.tally.requests} requests begun", flush=True)
        if fate != "none":
            self.tally.faults[fate] += 1
        seen: list[int] = []
        try:
            await asyncio.wait_for(self._serve(case, second, fate, seen, group), DEADLINE_S)
        except asyncio.TimeoutError:
            self.tally.hangs.append(f"{fate}: {type(second).__name__}")
        except (EngineError, httpx.HTTPError) as exc:
            self.tally.errors[type(exc).__name__] += 1
        if tuple(seen) != case.expected[: len(seen)]:
            self.tally.wrong.append(f"{fate}: {seen}, expected {case.expected}")

    def _choose(
        self, sides: tuple[LocalInstance, RemoteInstance]
    ) -> LocalInstance | RemoteInstance:
        """Choose a side at random; one that is known to be down only sometimes, like a proxy."""
        local, remote = sides
        chosen = self._numbers.choice(sides)
        if chosen is remote and remote.served is None and self._numbers.random() < 0.9:
            return local
        return chosen

    async def _serve(
        self, case: Case, second: SoakInstance, fate: str, seen: list[int], group: str | None
    ) -> None:
        if self._over.decode_first:
            params: KVTransferDict | None = self._order_prefill(case, fate)
        else:
            params = await self._prefill(case, self._choose(self._over.prefill), fate)
        if params is None:
            return
        if fate == "malformed":
            params = {**params, self._numbers.choice(sorted(params)): "what?"}
        limit = case.sampling.max_tokens or 0
        if group is not None:
            await asyncio.sleep(self._numbers.uniform(0.0, CHOICES_APART_S))
        answering = asyncio.create_task(
            second.answer(case, params, seen, max_tokens=limit, group=group)
        )
        if fate == "left during decode":
            await leave(answering, self._numbers.uniform(0.0, 0.2))
            return
        answer = await answering
        if answer.finish is FinishReason.LENGTH and tuple(answer.tokens) == case.expected:
            self.tally.right += 1
        else:
            self.tally.wrong.append(f"{fate}: {answer}, expected {case.expected}")

    async def _prefill(self, case: Case, first: SoakInstance, fate: str) -> KVTransferDict | None:
        prefilling = asyncio.create_task(first.answer(case, ORDER, [], max_tokens=1))
        if fate == "left during prefill":
            await leave(prefilling, self._numbers.uniform(0.0, 0.02))
            return None
        params = (await prefilling).params
        assert params is not None, "a prefill without params"
        if fate == "aborted":
            await first.abort(params["remote_request_id"])
        if fate == "late":
            await asyncio.sleep(LEASE_S * 1.5)
        return None if fate == "abandoned" else params

    def _order_prefill(self, case: Case, fate: str) -> KVTransferDict:
        """The params for the decode instance, which receives the request first."""
        key = str(next(self._keys))
        self._sent[key] = case, fate
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "do_pull": self._over.connector != LAYERWISE,
            "metaserver": self._metaserver.url(key),
        }

    async def _dispatch(self, key: str, params: KVTransferDict) -> None:
        """Send the prefill that a decode instance asked for, unless the fate is to abandon it."""
        case, fate = self._sent.pop(key)
        if params["remote_port"] == self._over.relayed_port:
            params = {**params, "remote_port": self._over.relay.port}
        if fate == "late":
            await asyncio.sleep(LEASE_S * 1.5)
        if fate == "abandoned":
            return
        first = self._choose(self._over.prefill)
        prefilling = asyncio.create_task(first.answer(case, params, [], max_tokens=1))
        after_s = self._numbers.uniform(0.0, 0.02) if fate == "left during prefill" else DEADLINE_S
        await leave(prefilling, after_s)

    async def _kill_now_and_then(self) -> None:
        while self._with_kills:
            await asyncio.sleep(self._numbers.uniform(1.0, 3.0))
            victim = self._numbers.choice((self._over.prefill[1], self._over.decode[1]))
            await victim.kill()
            self.tally.faults[f"killed {victim.role.value}"] += 1
            await victim.start()

    async def _settle(self) -> None:
        """Check that every block is free within a lease plus a transfer timeout, and that the block
        accounting is consistent."""
        within_s = LEASE_S + TRANSFER_TIMEOUT_S + 15.0
        for local, remote in (self._over.prefill, self._over.decode):
            try:
                await local.instance.check_clean(within_s)
                if remote.served is not None:
                    await remote.served.wait_until_idle(within_s)
            except AssertionError as exc:
                self.tally.leaked.append(str(exc))


async def leave(task: asyncio.Task[Answer], after_s: float) -> None:
    """Cancel the request after a while, as when a client disconnects."""
    await asyncio.wait({task}, timeout=after_s)
    task.cancel()
    with suppress(asyncio.CancelledError, EngineError, httpx.HTTPError):
        await task


async def make_cases(model: Path, seed: int) -> list[Case]:
    """Requests, some with common prefixes, with a single instance's answers."""
    numbers = random.Random(seed)
    prefixes = [prompt_of(length, seed=-length) for length in (0, 48, 130)]
    cases = []
    async with instance(model) as single:
        for index in range(NUM_CASES):
            prompt = numbers.choice(prefixes) + prompt_of(numbers.randrange(1, 120), seed=index)
            for choice in range(1 if index % 4 else NUM_CHOICES):
                sampling = replace(GREEDY, max_tokens=numbers.randrange(2, 24))
                if choice or numbers.random() < 0.3:
                    sampling = replace(sampling, temperature=0.8, seed=NUM_CHOICES * index + choice)
                expected = tuple((await ask(single, prompt, sampling)).tokens)
                cases.append(Case(prompt, sampling, expected))
    return cases


async def soak(model: Path, plan: Plan) -> Tally:
    """Run a soak."""
    cases = await make_cases(model, plan.seed)
    async with soak_fleet(model, plan.connector, pulls_early=plan.pulls_early) as over:
        soaking = Soak(over, cases, plan.seed, with_kills=plan.with_kills)
        return await soaking.run(plan.num_requests)


def report(tally: Tally, seconds: float) -> str:
    """The results as text; the three counts that must be zero come last."""
    faults = ", ".join(f"{count} {what}" for what, count in sorted(tally.faults.items()))
    errors = ", ".join(f"{count} {what}" for what, count in sorted(tally.errors.items()))
    lines = [
        f"requests       {tally.requests} in {seconds:.0f} s, {tally.right} answered in full",
        f"faults         {sum(tally.faults.values())}: {faults}",
        f"read early     {tally.early_bytes} bytes by the decode instance of this process",
        f"errors         {sum(tally.errors.values())}: {errors or 'none'}",
        f"wrong answers  {len(tally.wrong)}",
        f"leaked blocks  {len(tally.leaked)} instances with any",
        f"hangs          {len(tally.hangs)}",
    ]
    return "\n".join([*lines, *tally.wrong[:5], *tally.leaked, *tally.hangs[:5]])


def run_soak(model: Path, plan: Plan) -> Tally:
    """Run a soak and print its report."""
    started = time.monotonic()
    tally = asyncio.run(soak(model, plan))
    print(report(tally, time.monotonic() - started), flush=True)
    return tally
