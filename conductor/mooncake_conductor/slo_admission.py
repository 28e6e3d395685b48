"""Admission by objectives: compares forecasts with the objectives of request classes.

Refuses requests that would miss their objectives, and suggests when to retry.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from mooncake_conductor.decode_choice import DecodeView
from mooncake_conductor.errors import ConductorConfigError

MIN_RETRY_S, MAX_RETRY_S = 1, 60
"""Bounds of ``Retry-After``. Clients ignore values above a minute and retry immediately."""
_JITTER = 0.2
_SHED_POWER = 5


class AdmissionMode(Enum):
    """When load leads to a refusal."""

    NONE = "none"
    """Never."""
    BASELINE = "baseline"
    """By prefill load at arrival, and by decode load after the prefill, which is wasted then."""
    EARLY = "early"
    """By both loads at arrival, as they are then."""
    PREDICTIVE = "predictive"
    """By both loads at arrival, the decode load as expected at the end of the prefill."""

    @property
    def view(self) -> DecodeView:
        """Which decode load decides."""
        is_now = self in (AdmissionMode.BASELINE, AdmissionMode.EARLY)
        return DecodeView.NOW if is_now else DecodeView.PREDICTED


class Refusal(Enum):
    """Why a request is refused. The value is the ``code`` of the error that the client gets."""

    SLO_TTFT = "slo_ttft"
    """Its first token would miss the TTFT objective."""
    SLO_TBT = "slo_tbt"
    """Its tokens would miss the TBT objective."""
    DECODE_FULL = "decode_full"
    """No decode instance has capacity."""
    SHED = "shed"
    """Its class is best effort, and is shed under high load."""


@dataclass(frozen=True, slots=True)
class UnloadedLatency:
    """Unloaded latencies: seconds on the fastest idle instance, with nothing reused."""

    ttft: float
    tbt: float


NO_UNLOADED_LATENCY = UnloadedLatency(math.inf, math.inf)
"""Used if no objective is a multiple of the unloaded latency."""


@dataclass(frozen=True, slots=True)
class Objective:
    """The objective of a request class. Of an absolute and a relative limit the tighter one holds.

    Args:
        ttft_s: limit of the TTFT, in seconds.
        tbt_s: limit of the TBT, in seconds.
        is_best_effort: requests are shed, more often the closer load is to the objective.
        ttft_scale: limit of the TTFT as a multiple of the unloaded latency, as in the paper.
        tbt_scale: limit of the TBT as a multiple of the unloaded latency.
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

    def in_seconds(self, unloaded: UnloadedLatency) -> Objective:
        """The objective in seconds for a request with these unloaded latencies."""
        ttft, tbt = self.ttft_s, self.tbt_s
        if math.isfinite(self.ttft_scale):
            ttft = min(ttft, self.ttft_scale * unloaded.ttft)
        if math.isfinite(self.tbt_scale):
            tbt = min(tbt, self.tbt_scale * unloaded.tbt)
        return Objective(ttft, tbt, self.is_best_effort)


def objective(ttft: str, tbt: str, *, is_best_effort: bool = False) -> Objective:
    """Parse an objective: limits in milliseconds, or multiples of the unloaded latency (``10x``).

    Raises:
        ConductorConfigError: a limit is neither.
    """
    (ttft_s, ttft_scale), (tbt_s, tbt_scale) = _limit(ttft), _limit(tbt)
    return Objective(ttft_s, tbt_s, is_best_effort, ttft_scale, tbt_scale)


def _limit(text: str) -> tuple[float, float]:
    """Parse a limit to (seconds, multiple); one of them is infinite."""
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
    """Objectives of all request classes.

    Args:
        default: objective of classes that are not in `by_class`.
        by_class: objectives by class name.
    """

    default: Objective = field(default_factory=Objective)
    by_class: Mapping[str, Objective] = field(default_factory=dict)

    def of(self, request_class: str) -> Objective:
        """The objective of a class."""
        return self.by_class.get(request_class, self.default)


@dataclass(frozen=True, slots=True)
class Forecast:
    """Expected latencies of a request.

    Args:
        ttft: seconds to the first token; 0 after the prefill.
        tbt: seconds between tokens; infinite if no instance has capacity.
        drain_s: mean seconds until a sequence leaves the decode instance.
        unloaded: unloaded latencies, to which relative objectives refer.
    """

    ttft: float
    tbt: float
    drain_s: float = 1.0
    unloaded: UnloadedLatency = NO_UNLOADED_LATENCY


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a request is admitted, and if not, why and when to retry.

    Args:
        refusal: reason of the refusal; None if the request is admitted.
        retry_after_s: when to retry, 1 to 60 whole seconds; 0 if the request is admitted.
    """

    refusal: Refusal | None = None
    retry_after_s: int = 0

    @property
    def is_admitted(self) -> bool:
        """Whether the request is served."""
        return self.refusal is None


ADMITTED = Verdict()


class Admission:
    """Compares forecasts with objectives.

    Args:
        mode: when load leads to a refusal.
        objectives: objectives of the request classes.
        rng: adds jitter to retry times, and decides which best-effort requests are shed.
    """

    def __init__(self, mode: AdmissionMode, objectives: Objectives, rng: random.Random) -> None:
        self.mode = mode
        self.objectives = objectives
        self._rng = rng

    def at_arrival(self, request_class: str, forecast: Forecast) -> Verdict:
        """Decide at the arrival of a request."""
        if self.mode is AdmissionMode.NONE:
            return ADMITTED
        wanted = self.objectives.of(request_class).in_seconds(forecast.unloaded)
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
        """Decide again after the prefill, by the decode load, in every mode but `none`."""
        if self.mode is AdmissionMode.NONE:
            return ADMITTED
        wanted = self.objectives.of(request_class).in_seconds(forecast.unloaded)
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
        """About `seconds` as whole seconds for ``Retry-After``, with jitter, from 1 to 60."""
        if not math.isfinite(seconds):
            return MAX_RETRY_S
        spread = seconds * (1 + self._rng.uniform(-_JITTER, _JITTER))
        return int(min(max(math.ceil(spread), MIN_RETRY_S), MAX_RETRY_S))
