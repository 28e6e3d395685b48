"""Measures an instance: sends a bounded number of requests, fits and stores its latencies."""

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
"""Answers that don't overlap are requested again, with up to this multiple of the plan's tokens."""
_MIN_COMMON = 8
"""Least number of parts of each answer that arrive while all answers decode. Fewer could be from
one burst, with hardly any time between them."""


@dataclass(frozen=True, slots=True)
class CalibrationPlan:
    """The requests that a calibration sends; no others are sent.

    Args:
        prompt_tokens: lengths of prompts; each is sent ``repeats`` times, one at a time.
        repeats: measured repetitions, after one warm-up that is not counted.
        queue: prompts of each length that are also sent concurrently. The last one waits for
            computation only, so the overhead of single requests can be separated.
        batches: numbers of requests that decode concurrently.
        decode_context: tokens of their prompts.
        decode_tokens: tokens of each answer; up to 8 times as many if answers don't overlap.
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
        """Number of requests if all answers overlap; otherwise up to 4 times as many decodes."""
        prefills = len(self.prompt_tokens) * (self.repeats + 1 + self.queue)
        return prefills + sum(self.batches) * len(self.decode_context)


class Completer(Protocol):
    """An instance whose answers are timed; implemented by ``LiveInstance``."""

    model: str

    def complete(self, prompt: Sequence[int], num_tokens: int) -> TimedCompletion:
        """Generate `num_tokens` tokens for a prompt of token ids. Thread-safe."""
        ...


class DeviceRow(msgspec.Struct, frozen=True):
    """The result of a calibration, as stored in a file. Times in seconds.

    ``fixed`` to ``step_per_context_token`` are the coefficients of ``LatencyModel``.

    Args:
        name: name of the row.
        model: model that the instance served.
        prefill_error: largest relative error of the prefill fit.
        step_error: largest relative error of the decode step fit.
        first_token: part of the TTFT in which no instance is busy.
        hand_over: time from the first token to the start of the first decode step, on an idle
            decode instance.
        join_steps: further steps, besides the running one, until a busy decode instance includes a
            new sequence.
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
        """The latency model of the instance."""
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
    """Measure an instance, which must have no other load.

    Raises:
        CalibrationFailed: the instance does not answer.
    """
    rng, prefills, steps = random.Random(1), [], []
    share = 1 / (len(plan.prompt_tokens) + len(plan.batches) * len(plan.decode_context))

    def say(done: int) -> None:
        if progress is not None:
            progress(done * share)

    for done, length in enumerate(plan.prompt_tokens, 1):
        asked = [random_prompt(rng, length, plan) for _ in range(plan.repeats + 1)]
        elapsed = [instance.complete(prompt, 1).ttft for prompt in asked][1:]
        prefills.append(((1.0, length, length**2, 1.0), median(elapsed)))
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
    """Write a row to a file, for ``simulate --calibrated``."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(row), indent=2) + b"\n")


def read_row(path: Path) -> DeviceRow:
    """Read a row from a file.

    Raises:
        ConductorConfigError: the file can't be read, or contains no row.
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
    """Random token ids, which no prefix cache contains."""
    return [rng.randrange(8, plan.max_token_id) for _ in range(length)]


def _queue_seconds(instance: Completer, prompts: Sequence[Sequence[int]]) -> float:
    """Seconds from sending these prompts concurrently until the last one has its first token."""
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = list(pool.map(lambda prompt: instance.complete(prompt, 1), prompts))
    return max(a.arrivals[0] for a in answers) - min(a.started for a in answers)


def _step_seconds(
    instance: Completer, prompts: Sequence[Sequence[int]], num_tokens: int
) -> tuple[float, int]:
    """Seconds of a decode step while all requests decode, and the tokens requested per answer.

    If answers end before the last prompt is computed, longer ones are requested.
    """
    for tokens in (num_tokens, 2 * num_tokens, 4 * num_tokens, LONGEST * num_tokens):
        with ThreadPoolExecutor(len(prompts)) as pool:
            answers = [pool.submit(instance.complete, prompt, tokens) for prompt in prompts]
            gaps = _common_gaps([answer.result() for answer in answers])
        if gaps:
            return median(gaps), tokens
    raise CalibrationFailed(
        f"{len(prompts)} requests of {LONGEST * num_tokens} tokens never decoded concurrently: "
        "ask for more decode tokens"
    )


def _common_gaps(done: Sequence[TimedCompletion]) -> list[float]:
    """Each answer's mean seconds per token while all of them decode; empty if that is too short.

    Means, because tokens may arrive in bursts.
    """
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
    """Nonnegative coefficients of least relative error, and the largest relative error left."""
    rows = np.array([features for features, _ in points])
    seconds = np.array([elapsed for _, elapsed in points])
    scales = np.maximum(rows.max(axis=0), 1e-12)
    weighted = rows / scales / seconds[:, None]
    found = nonnegative_least_squares(weighted.T @ weighted, weighted.sum(axis=0)) / scales
    error = np.abs(rows @ found / seconds - 1).max()
    return [float(each) for each in found], float(error)
