"""Measures the latency that the path through a proxy adds to the computation of its instances."""

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
"""Least number of probes that are answered while all background requests decode."""


def measure_path(row: DeviceRow, proxy: Completer, plan: CalibrationPlan) -> DeviceRow:
    """Add the overhead of the path through a proxy to a row: that of the first token, and that of
    the handover to an idle and to a busy decode instance.

    Args:
        row: measured latencies of the instances behind the proxy, which must have no other load.
        proxy: a proxy with prefill and decode instances; at most as many of the latter as the
            plan's largest batch, which has to keep all of them busy.
        plan: the requests to send.

    Raises:
        CalibrationFailed: the proxy does not answer.
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
    """Steps between the end of the running step and the first step of a new request, on a decode
    instance with other requests.

    On average a new request arrives in the middle of a step, and its own step follows that one:
    1.5 steps are therefore subtracted from the measured gap.
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
        f"{len(others)} answers of {num_tokens} tokens ended too soon to see how others join "
        "them: ask for more decode tokens"
    )


def _beside(
    probes: Sequence[TimedCompletion], busy: Sequence[TimedCompletion]
) -> list[TimedCompletion]:
    """The probes whose first two tokens arrived while all background requests decoded."""
    begin, end = max(b.arrivals[0] for b in busy), min(b.arrivals[-1] for b in busy)
    return [probe for probe in probes if begin <= probe.arrivals[0] and probe.arrivals[1] <= end]
