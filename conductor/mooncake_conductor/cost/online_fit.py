"""Online estimation: fits latency models to measurements, and computes running quantiles."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from mooncake_conductor.cost.latency_model import LatencyModel

_FORGETTING = 0.999
"""Weight of past reports per new report: one that is a thousand reports old counts a third."""
_PRIOR_REPORTS = 1.0
"""Weight of the initial coefficients, in reports of the usual size. Scaling by the usual size lets
measurements of short prompts override the prior as soon as those of long ones."""
_OUTLIER_FACTOR = 4.0
"""A report above this multiple of the expected time is an outlier candidate. A first request that
compiles kernels, or an instance that was descheduled for a moment, takes a hundred times as long as
the next one. Such a report would keep requests away from the instance, and with them the reports
that would correct it."""


def nonnegative_least_squares(
    gram: NDArray[np.float64], moment: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Solve ``gram · x = moment`` with x ≥ 0; features with negative coefficients are left out.

    Args:
        gram: ``[features, features]``, products of features summed over reports.
        moment: ``[features]``, products of features and values summed over reports.
    """
    free = np.ones(len(moment), dtype=np.bool_)
    found = np.zeros(len(moment))
    # The ridge makes the solution unique while reports are too few to separate the features.
    ridge = 1e-9 * max(float(np.trace(gram)), 1e-9)
    while free.any():
        tiny = ridge * np.eye(int(free.sum()))
        found[:] = 0.0
        found[free] = np.linalg.solve(gram[np.ix_(free, free)] + tiny, moment[free])
        if (found >= 0).all():
            break
        free &= found > 0
    return np.maximum(found, 0.0)


class OnlineFit:
    """Recursive least squares over reports; older reports count less.

    Features are scaled by their usual size; coefficients are never negative.

    Args:
        prior: initial coefficients.
        scales: usual size of each feature.
    """

    def __init__(self, prior: Sequence[float], scales: Sequence[float]) -> None:
        self._scales = np.array(scales, dtype=np.float64)
        self._prior = np.array(prior, dtype=np.float64) * self._scales
        self._gram: NDArray[np.float64] = np.zeros((len(prior), len(prior)))
        self._moment: NDArray[np.float64] = np.zeros(len(prior))
        self._weight = 0.0
        self._found = self._prior
        self._outlier: tuple[NDArray[np.float64], float] | None = None
        self.num_reports = 0

    def report(self, features: Sequence[float], seconds: float) -> None:
        """Add a measurement.

        One that is not a finite positive number is ignored. One far above the expected time is held
        back, and counts only if the next one is also far above. The expected time is that of the
        latest `coefficients`.
        """
        if not 0 < seconds < float("inf"):
            return
        row = np.array(features) / self._scales
        outlier, self._outlier = self._outlier, None
        if seconds > _OUTLIER_FACTOR * float(row @ self._found):
            if outlier is None:
                self._outlier = row, seconds
                return
            self._add(*outlier)
        self._add(row, seconds)

    def coefficients(self) -> list[float]:
        """The best fit to all reports so far; no coefficient is negative."""
        usual = np.diag(self._gram) / max(self._weight, 1.0)
        prior = _PRIOR_REPORTS * np.where(usual > 0, usual, 1.0)
        self._found = nonnegative_least_squares(
            self._gram + np.diag(prior), self._moment + prior * self._prior
        )
        return [float(value) for value in self._found / self._scales]

    def _add(self, row: NDArray[np.float64], seconds: float) -> None:
        self._gram = _FORGETTING * self._gram + np.outer(row, row)
        self._moment = _FORGETTING * self._moment + row * seconds
        self._weight = _FORGETTING * self._weight + 1.0
        self.num_reports += 1


class LatencyEstimator:
    """Estimates one instance's latency model from its measurements.

    Args:
        cold: the model before the first measurement.
    """

    def __init__(self, cold: LatencyModel) -> None:
        self._prefill = OnlineFit(cold.prefill_coefficients, (1.0, 4096.0, 4096.0**2))
        self._step = OnlineFit(cold.step_coefficients, (1.0, 16.0, 65536.0))

    def prefilled(self, num_tokens: int, num_reused: int, seconds: float) -> None:
        """Add a measured prefill, without queueing and KV loads."""
        computed, pairs = num_tokens - num_reused, num_tokens**2 - num_reused**2
        self._prefill.report((1.0, computed, pairs), seconds)

    def stepped(self, num_sequences: int, num_context_tokens: int, seconds: float) -> None:
        """Add a measured decode step."""
        self._step.report((1.0, max(num_sequences - 1, 0), num_context_tokens), seconds)

    def model(self) -> LatencyModel:
        """The current estimate."""
        fixed, per_token, squared = self._prefill.coefficients()
        step, per_sequence, per_context = self._step.coefficients()
        return LatencyModel(fixed, per_token, squared, step, per_sequence, per_context)


class RunningQuantile:
    """A quantile of the latest reports.

    Args:
        share: the quantile, 0 to 1.
        initial: value before the first report.
        window: number of reports that count.
    """

    def __init__(self, share: float, initial: float, window: int = 512) -> None:
        self._share = share
        self._initial = initial
        self._window = window
        self._recent: deque[tuple[float, float]] = deque()  # time, value
        self._ordered: list[float] = []

    def report(self, value: float, now: float = 0.0) -> None:
        """Add a value. `now` matters only to `forget_before`."""
        if len(self._recent) == self._window:
            self._forget_oldest()
        self._recent.append((now, value))
        insort(self._ordered, value)

    def forget_before(self, time: float) -> None:
        """Forget the reports before `time`."""
        while self._recent and self._recent[0][0] < time:
            self._forget_oldest()

    @property
    def value(self) -> float:
        """The current quantile."""
        if not self._ordered:
            return self._initial
        return self._ordered[min(int(self._share * len(self._ordered)), len(self._ordered) - 1)]

    def _forget_oldest(self) -> None:
        _, value = self._recent.popleft()
        del self._ordered[bisect_left(self._ordered, value)]
