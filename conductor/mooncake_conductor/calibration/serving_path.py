"""What a request's way through a proxy costs, besides what its instances compute."""

from __future__ import annotations

import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from statistics import median

import msgspec

from mooncake_conductor.calibration.live_instance import TimedCompletion
from mooncake_conductor.calibration.measured_costs import (
    LONGEST,
    CalibrationPlan,
    Completer,
    DeviceRow,
    random_prompt,
)
from mooncake_conductor.errors import CalibrationFailed

_PROBE_TOKENS = 2
_NUM_PROBES = 24
_MIN_PROBES = 12
"""That were answered while all others decoded."""


def measure_path(row: DeviceRow, proxy: Completer, plan: CalibrationPlan) -> DeviceRow:
    """A row of one instance, with what the way through a proxy adds: the first token's, and the
    hand-over to a decode instance that is idle, and to one that decodes.

    Args:
        row: of the instances behind the proxy, which nobody else uses meanwhile.
        proxy: of prefill and decode instances; not more of the latter than the plan's largest
            batch, which is to keep all of them busy.
        plan: of requests.

    Raises:
        CalibrationFailed: it does not answer.
    """
    rng, costs, first_tokens, hand_overs = random.Random(2), row.latency, [], []
    for length in plan.prompt_tokens:
        prompts = [random_prompt(rng, length, plan) for _ in range(plan.repeats + 1)]
        done = [proxy.complete(prompt, _PROBE_TOKENS) for prompt in prompts][1:]
        first_tokens.append(median(d.ttft for d in done) - costs.prefill_seconds(length, 0))
        hand_overs.append(median(d.gaps[0] for d in done) - costs.step_seconds(1, length))
    hand_over = max(median(hand_overs), 0.0)
    return msgspec.structs.replace(
        row,
        first_token=max(median(first_tokens), 0.0),
        hand_over=hand_over,
        join_steps=_join_steps(proxy, plan, hand_over, rng),
    )


def _join_steps(
    proxy: Completer, plan: CalibrationPlan, hand_over: float, rng: random.Random
) -> int:
    """How many steps later than at the end of the running one a new request's first step begins,
    where its decode instance has others.

    They end half a step after it has come, on average, and its own step follows.
    """
    others = [random_prompt(rng, plan.decode_context[0], plan) for _ in range(max(plan.batches))]
    for num_tokens in (plan.decode_tokens * times for times in (LONGEST // 2, LONGEST)):
        with ThreadPoolExecutor(len(others)) as pool:
            answers = [pool.submit(proxy.complete, prompt, num_tokens) for prompt in others]
            probes: list[TimedCompletion] = []
            while len(probes) < _NUM_PROBES and not any(answer.done() for answer in answers):
                prompt = random_prompt(rng, plan.prompt_tokens[0], plan)
                probes.append(proxy.complete(prompt, _PROBE_TOKENS))
            busy = [answer.result() for answer in answers]
        beside = _beside(probes, busy)
        if len(beside) >= _MIN_PROBES:
            step = median(each.mean_gap for each in busy)
            waited = median(probe.gaps[0] for probe in beside) - hand_over
            return max(round(waited / step - 1.5), 0)
    raise CalibrationFailed(
        f"{len(others)} answers of {num_tokens} tokens were over too soon to see how others join "
        "them: ask for more decode tokens"
    )


def _beside(
    probes: Sequence[TimedCompletion], busy: Sequence[TimedCompletion]
) -> list[TimedCompletion]:
    """Those that came to their second token while all others decoded."""
    begin, end = max(b.arrivals[0] for b in busy), min(b.arrivals[-1] for b in busy)
    return [probe for probe in probes if begin <= probe.arrivals[0] and probe.arrivals[1] <= end]
