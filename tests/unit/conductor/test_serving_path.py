"""The measured overhead of the path through a proxy, on idle and on busy decode instances."""

from __future__ import annotations

import threading
from itertools import accumulate

import pytest

from mooncake_conductor.calibration.live_instance import TimedCompletion
from mooncake_conductor.calibration.measured_costs import CalibrationPlan, DeviceRow
from mooncake_conductor.calibration.serving_path import measure_path
from mooncake_conductor.errors import CalibrationFailed

PLAN = CalibrationPlan((64, 256), batches=(1, 3), decode_context=(64,))
STEP, FIRST_TOKEN, HAND_OVER = 0.02, 0.004, 0.009
ROW = DeviceRow("a", "b", 0.01, 1e-4, 0.0, STEP, 0.0, 0.0, 0.0, 0.0, first_token=0.001)


class Modelled:
    """A proxy in front of instances with the costs of ``ROW``. Long answers end once all probes
    have been answered, or at once if ``is_hasty``."""

    model = "modelled"

    def __init__(self, join_steps: int = 0, *, is_hasty: bool = False) -> None:
        self._join_steps = join_steps
        self._is_hasty = is_hasty
        self._has_probed = threading.Event()
        self._num_probes = 0
        self.asked_for: list[int] = []

    def complete(self, prompt, num_tokens: int) -> TimedCompletion:
        if num_tokens == 2:
            return self._probe(prompt)
        self.asked_for.append(num_tokens)
        if not self._is_hasty:
            assert self._has_probed.wait(30)
        return self._answer(0.0, 0.01, 0.0, 1 if self._is_hasty else 100 * num_tokens)

    def _probe(self, prompt) -> TimedCompletion:
        ttft = FIRST_TOKEN + ROW.latency.prefill_seconds(len(prompt), 0)
        waits = HAND_OVER
        number = self._num_probes - len(PLAN.prompt_tokens) * (PLAN.repeats + 1)
        if number >= 0:  # on a busy instance, at any point of its steps
            waits += STEP * (self._join_steps + (number % 5) / 4)
            if number == 23:
                self._has_probed.set()
        self._num_probes += 1
        return self._answer(1.0 + self._num_probes, ttft, waits, 1)

    def _answer(self, started: float, ttft: float, waits: float, gaps: int) -> TimedCompletion:
        arrivals = accumulate([started + ttft, waits + STEP, *[STEP] * (gaps - 1)])
        return TimedCompletion(started, tuple(arrivals), gaps + 1)


@pytest.mark.parametrize("join_steps", [0, 1, 2])
def test_measurement_recovers_the_overhead_of_the_path(join_steps: int) -> None:
    row = measure_path(ROW, Modelled(join_steps), PLAN)
    assert row.first_token == pytest.approx(FIRST_TOKEN)
    assert row.hand_over == pytest.approx(HAND_OVER)
    assert row.join_steps == join_steps
    assert row.latency == ROW.latency


def test_answers_that_end_early_are_retried_longer_then_reported() -> None:
    proxy = Modelled(is_hasty=True)
    with pytest.raises(CalibrationFailed, match="ask for more decode tokens"):
        measure_path(ROW, proxy, PLAN)
    busy = max(PLAN.batches)
    assert proxy.asked_for == [times * PLAN.decode_tokens for times in (4, 8) for _ in range(busy)]
