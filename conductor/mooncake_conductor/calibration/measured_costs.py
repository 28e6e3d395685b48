"""A row of the device table, measured: bounded requests, fitted costs, a file to keep."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Protocol

import msgspec
import numpy as np

from mooncake_conductor.calibration.live_instance import TimedCompletion
from mooncake_conductor.cost.latency_model import LatencyModel
from mooncake_conductor.cost.online_fit import nonnegative_least_squares
from mooncake_conductor.errors import CalibrationFailed, ConductorConfigError

LONGEST = 8
"""Times the tokens of a plan that an answer may have at most, where answers don't overlap."""
_MIN_COMMON = 8
"""Parts of each answer that come while all of them decode: fewer may be of one burst, with hardly
any time between them."""


@dataclass(frozen=True, slots=True)
class CalibrationPlan:
    """What is asked of an instance; no more than this.

    Args:
        prompt_tokens: lengths of prompts; each is asked for ``repeats`` times, one at a time.
        repeats: after one that is not counted.
        queue: prompts of each length that are sent at once, too: what the last of them waits for is
            computation, the rest of a lone one's time is not.
        batches: requests that decode at once.
        decode_context: tokens of their prompts.
        decode_tokens: of each answer; up to 8 times as many where answers don't overlap.
        max_token_id: token ids are drawn below it; at least 16.
    """

    prompt_tokens: tuple[int, ...] = (64, 256, 512, 1024, 1536)
    repeats: int = 3
    queue: int = 8
    batches: tuple[int, ...] = (1, 2, 4, 8)
    decode_context: tuple[int, ...] = (64, 1024)
    decode_tokens: int = 48
    max_token_id: int = 200

    def __post_init__(self) -> None:
        lists = (self.prompt_tokens, self.batches, self.decode_context)
        smallest = min(min(each, default=0) for each in lists)
        is_short = self.decode_tokens < 8 or self.max_token_id < 16
        if smallest < 1 or self.repeats < 1 or self.queue < 2 or is_short:
            raise ConductorConfigError(
                "a calibration needs prompts, batches and contexts of at least 1, 2 prompts in a "
                f"queue, 8 tokens to decode and token ids up to 16, found {self}"
            )

    @property
    def num_requests(self) -> int:
        """How many requests it sends, if all answers overlap; at most 4 times as many decode."""
        prefills = len(self.prompt_tokens) * (self.repeats + 1 + self.queue)
        return prefills + sum(self.batches) * len(self.decode_context)


class Completer(Protocol):
    """An instance that answers prompts and says when: ``LiveInstance``."""

    model: str

    def complete(self, prompt: Sequence[int], num_tokens: int) -> TimedCompletion:
        """Take that many tokens for a prompt of token ids; may be called from several threads."""
        ...


class DeviceRow(msgspec.Struct, frozen=True):
    """What was measured, as it stands in a file; times in seconds.

    Args:
        name, model: of the row, and what ran.
        fixed, per_token, per_token_squared, step, step_per_sequence, step_per_context_token: of the
            instance, as ``LatencyModel`` has them.
        prefill_error, step_error: the largest relative errors of the fit.
        first_token: of a first token's time, what keeps no instance busy.
        hand_over: from a first token to the beginning of the first step of decoding, on an idle
            decode instance.
        join_steps: that a busy decode instance takes longer, besides the running one.
    """

    name: str
    model: str
    fixed: float
    per_token: float
    per_token_squared: float
    step: float
    step_per_sequence: float
    step_per_context_token: float
    prefill_error: float
    step_error: float
    first_token: float = 0.0
    hand_over: float = 0.0
    join_steps: int = 0

    @property
    def latency(self) -> LatencyModel:
        """As the conductor and the simulator use it."""
        return LatencyModel(
            self.fixed,
            self.per_token,
            self.per_token_squared,
            self.step,
            self.step_per_sequence,
            self.step_per_context_token,
        )


def calibrate(
    name: str,
    instance: Completer,
    plan: CalibrationPlan,
    progress: Callable[[float], None] | None = None,
) -> DeviceRow:
    """Measure an instance that nobody else uses meanwhile.

    Raises:
        CalibrationFailed: it does not answer.
    """
    rng, prefills, steps = random.Random(1), [], []
    share = 1 / (len(plan.prompt_tokens) + len(plan.batches) * len(plan.decode_context))

    def say(done: int) -> None:
        if progress is not None:
            progress(done * share)

    for done, length in enumerate(plan.prompt_tokens, 1):
        asked = [random_prompt(rng, length, plan) for _ in range(plan.repeats + 1)]
        took = [instance.complete(prompt, 1).ttft for prompt in asked][1:]
        prefills.append(((1.0, length, length**2, 1.0), median(took)))
        queue = [random_prompt(rng, length, plan) for _ in range(plan.queue)]
        work = (plan.queue, plan.queue * length, plan.queue * length**2, 1.0)
        prefills.append((work, _queue_seconds(instance, queue)))
        say(done)
    for context in plan.decode_context:
        for batch in plan.batches:
            prompts = [random_prompt(rng, context, plan) for _ in range(batch)]
            seconds, num_tokens = _step_seconds(instance, prompts, plan.decode_tokens)
            held = batch * (context + num_tokens / 2)
            steps.append(((1.0, batch - 1, held), seconds))
            say(len(plan.prompt_tokens) + len(steps))
    (fixed, per_token, squared, first_token), prefill_error = _fit(prefills)
    (step, per_sequence, per_context), step_error = _fit(steps)
    return DeviceRow(
        name,
        instance.model,
        fixed,
        per_token,
        squared,
        step,
        per_sequence,
        per_context,
        prefill_error,
        step_error,
        first_token,
    )


def write_row(path: Path, row: DeviceRow) -> None:
    """Keep a row for ``simulate --calibrated``."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(row), indent=2) + b"\n")


def read_row(path: Path) -> DeviceRow:
    """A row that was kept.

    Raises:
        ConductorConfigError: it is none; says why.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=DeviceRow)
    except OSError as exc:
        raise ConductorConfigError(f"can't read {path}: {exc.strerror}") from exc
    except msgspec.DecodeError as exc:
        raise ConductorConfigError(
            f"{path} is no row of mooncake-conductor calibrate: {exc}"
        ) from exc


def random_prompt(rng: random.Random, length: int, plan: CalibrationPlan) -> list[int]:
    """Token ids that no cache has seen."""
    return [rng.randrange(8, plan.max_token_id) for _ in range(length)]


def _queue_seconds(instance: Completer, prompts: Sequence[Sequence[int]]) -> float:
    """From when these are sent at once until the last of them has its first token."""
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = list(pool.map(lambda prompt: instance.complete(prompt, 1), prompts))
    return max(a.arrivals[0] for a in answers) - min(a.started for a in answers)


def _step_seconds(
    instance: Completer, prompts: Sequence[Sequence[int]], num_tokens: int
) -> tuple[float, int]:
    """A step's time while all of them decode, and how many tokens each took for that.

    Answers that are over before the last prompt is computed are asked for again, longer.
    """
    for tokens in (num_tokens, 2 * num_tokens, 4 * num_tokens, LONGEST * num_tokens):
        with ThreadPoolExecutor(len(prompts)) as pool:
            answers = [pool.submit(instance.complete, prompt, tokens) for prompt in prompts]
            gaps = _common_gaps([answer.result() for answer in answers])
        if gaps:
            return median(gaps), tokens
    raise CalibrationFailed(
        f"{len(prompts)} requests of {LONGEST * num_tokens} tokens never decoded at once: ask for "
        "more decode tokens"
    )


def _common_gaps(done: Sequence[TimedCompletion]) -> list[float]:
    """Each answer's mean seconds per token while all of them decode, none if that is too short: a
    mean, as tokens may arrive in bursts."""
    begin = max(each.arrivals[0] for each in done)
    end = min(each.arrivals[-1] for each in done)
    common = [[at for at in each.arrivals if begin <= at <= end] for each in done]
    if min(map(len, common)) < _MIN_COMMON:
        return []
    return [
        (times[-1] - times[0]) / (len(times) - 1) / each.tokens_per_part
        for times, each in zip(common, done, strict=True)
    ]


def _fit(
    points: Sequence[tuple[tuple[float, ...], float]],
) -> tuple[list[float], float]:
    """Coefficients of least relative error, none below 0, and the largest relative error left."""
    rows = np.array([features for features, _ in points])
    seconds = np.array([took for _, took in points])
    scales = np.maximum(rows.max(axis=0), 1e-12)
    weighted = rows / scales / seconds[:, None]
    found = nonnegative_least_squares(weighted.T @ weighted, weighted.sum(axis=0)) / scales
    error = np.abs(rows @ found / seconds - 1).max()
    return [float(each) for each in found], float(error)
