"""Whether a request is served at all: objectives per class, refusals, and when to come back."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from mooncake_conductor.decode_choice import DecodeView
from mooncake_conductor.errors import ConductorConfigError

MIN_RETRY_S, MAX_RETRY_S = 1, 60
"""Clients ignore a ``Retry-After`` beyond a minute and come back at once."""
_JITTER = 0.2
_SHED_POWER = 5


class AdmissionMode(Enum):
    """When load leads to a refusal."""

    NONE = "none"
    """Never."""
    BASELINE = "baseline"
    """Prefill load at arrival; decode load once the prefill is done, and in vain."""
    EARLY = "early"
    """Both at arrival, by the load of that moment."""
    PREDICTIVE = "predictive"
    """Both at arrival, by the decode load that will be there when the prefill ends."""

    @property
    def view(self) -> DecodeView:
        """The decode load that decides."""
        is_now = self in (AdmissionMode.BASELINE, AdmissionMode.EARLY)
        return DecodeView.NOW if is_now else DecodeView.PREDICTED


class Refusal(Enum):
    """Why a request is not served: the ``code`` of the error that its client gets."""

    SLO_TTFT = "slo_ttft"
    """Its first token would come too late."""
    SLO_TBT = "slo_tbt"
    """Its tokens would come too slowly."""
    DECODE_FULL = "decode_full"
    """No decode instance has room."""
    SHED = "shed"
    """It is of a class that makes way when load rises."""


@dataclass(frozen=True, slots=True)
class Alone:
    """Seconds that a request takes on the fastest instance, alone and with nothing reused."""

    ttft: float
    tbt: float


NOT_ALONE = Alone(math.inf, math.inf)
"""Where no objective is a multiple."""


@dataclass(frozen=True, slots=True)
class Objective:
    """What a class of requests wants; of two limits the tighter one holds.

    Args:
        ttft_s: time to the first token at most.
        tbt_s: time between tokens at most.
        is_best_effort: it is refused the more often, the nearer load comes to its objectives.
        ttft_scale, tbt_scale: the same as multiples of what the request would take alone, with
            nothing reused, as the paper states its objectives.
    """

    ttft_s: float = math.inf
    tbt_s: float = math.inf
    is_best_effort: bool = False
    ttft_scale: float = math.inf
    tbt_scale: float = math.inf

    def __post_init__(self) -> None:
        if not min(self.ttft_s, self.tbt_s, self.ttft_scale, self.tbt_scale) > 0:
            raise ConductorConfigError(f"objectives must be above 0, found {self}")

    @property
    def is_relative(self) -> bool:
        """Whether a limit is a multiple."""
        return math.isfinite(min(self.ttft_scale, self.tbt_scale))

    def in_seconds(self, alone: Alone) -> Objective:
        """What it means for a request that would take so long alone."""
        ttft, tbt = self.ttft_s, self.tbt_s
        if math.isfinite(self.ttft_scale):
            ttft = min(ttft, self.ttft_scale * alone.ttft)
        if math.isfinite(self.tbt_scale):
            tbt = min(tbt, self.tbt_scale * alone.tbt)
        return Objective(ttft, tbt, self.is_best_effort)


def objective(ttft: str, tbt: str, *, is_best_effort: bool = False) -> Objective:
    """An objective from options: milliseconds, or multiples like ``10x``.

    Raises:
        ConductorConfigError: one is neither.
    """
    (ttft_s, ttft_scale), (tbt_s, tbt_scale) = _limit(ttft), _limit(tbt)
    return Objective(ttft_s, tbt_s, is_best_effort, ttft_scale, tbt_scale)


def _limit(text: str) -> tuple[float, float]:
    """Seconds and multiple; one of them is infinite."""
    number = text.strip().lower()
    try:
        if number.endswith("x"):
            return math.inf, float(number[:-1])
        return float(number.removesuffix("ms")) / 1000, math.inf
    except ValueError as exc:
        raise ConductorConfigError(
            f"an objective is milliseconds (30000) or a multiple of the unloaded request (10x), "
            f"found {text!r}"
        ) from exc


@dataclass(frozen=True, slots=True)
class Objectives:
    """Objectives by class.

    Args:
        default: of a class that is not named.
        by_class: of those that are.
    """

    default: Objective = field(default_factory=Objective)
    by_class: Mapping[str, Objective] = field(default_factory=dict)

    def of(self, request_class: str) -> Objective:
        """What that class wants."""
        return self.by_class.get(request_class, self.default)


@dataclass(frozen=True, slots=True)
class Forecast:
    """What a request would meet.

    Args:
        ttft: seconds to the first token; 0 once the prefill is done.
        tbt: seconds between tokens; infinite if no instance has room.
        drain_s: until a sequence leaves the decode instance, on average.
        alone: what objectives in multiples refer to.
    """

    ttft: float
    tbt: float
    drain_s: float = 1.0
    alone: Alone = NOT_ALONE


@dataclass(frozen=True, slots=True)
class Verdict:
    """Admitted, or why not and when to come back.

    Args:
        refusal: None if the request is admitted.
        retry_after_s: whole seconds, 1 to 60; 0 if it is admitted.
    """

    refusal: Refusal | None = None
    retry_after_s: int = 0

    @property
    def is_admitted(self) -> bool:
        """Whether it is served."""
        return self.refusal is None


ADMITTED = Verdict()


class Admission:
    """Compares forecasts with objectives.

    Args:
        mode: when load leads to a refusal.
        objectives: what the classes want.
        rng: spreads the times at which refused clients come back.
    """

    def __init__(self, mode: AdmissionMode, objectives: Objectives, rng: random.Random) -> None:
        self.mode = mode
        self.objectives = objectives
        self._rng = rng

    def at_arrival(self, request_class: str, forecast: Forecast) -> Verdict:
        """Before anything is done for a request."""
        if self.mode is AdmissionMode.NONE:
            return ADMITTED
        wanted = self.objectives.of(request_class).in_seconds(forecast.alone)
        sees_decode = self.mode is not AdmissionMode.BASELINE
        refusal = None
        if forecast.ttft > wanted.ttft_s:
            refusal = Refusal.SLO_TTFT
        elif sees_decode and forecast.tbt > wanted.tbt_s:
            refusal = Refusal.SLO_TBT
        elif sees_decode and math.isinf(forecast.tbt):
            refusal = Refusal.DECODE_FULL
        elif wanted.is_best_effort and self._sheds(wanted, forecast):
            refusal = Refusal.SHED
        return self._verdict(refusal, wanted, forecast)

    def after_prefill(self, request_class: str, forecast: Forecast) -> Verdict:
        """Once the prefill is done: the decode instance's own check, in every mode but none."""
        if self.mode is AdmissionMode.NONE:
            return ADMITTED
        wanted = self.objectives.of(request_class).in_seconds(forecast.alone)
        refusal = None
        if math.isinf(forecast.tbt):
            refusal = Refusal.DECODE_FULL
        elif forecast.tbt > wanted.tbt_s:
            refusal = Refusal.SLO_TBT
        return self._verdict(refusal, wanted, forecast)

    def _sheds(self, wanted: Objective, forecast: Forecast) -> bool:
        load = max(forecast.ttft / wanted.ttft_s, forecast.tbt / wanted.tbt_s)
        return self._rng.random() < load**_SHED_POWER

    def _verdict(self, refusal: Refusal | None, wanted: Objective, forecast: Forecast) -> Verdict:
        if refusal is None:
            return ADMITTED
        late = max(forecast.ttft - wanted.ttft_s, 0.0) if math.isfinite(wanted.ttft_s) else 0.0
        drained = 0.0 if refusal is Refusal.SLO_TTFT else forecast.drain_s
        return Verdict(refusal, self.retry_after(max(late, drained)))

    def retry_after(self, seconds: float) -> int:
        """Whole seconds for ``Retry-After``: about as many, never below 1 nor above 60."""
        if not math.isfinite(seconds):
            return MAX_RETRY_S
        spread = seconds * (1 + self._rng.uniform(-_JITTER, _JITTER))
        return int(min(max(math.ceil(spread), MIN_RETRY_S), MAX_RETRY_S))
