"""Coefficients that follow what instances report, and quantiles of what they report."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from mooncake_conductor.cost.latency_model import LatencyModel

_FORGETTING = 0.999
"""A report of a thousand reports ago counts a third."""
_PRIOR_REPORTS = 1.0
"""How many reports the coefficients of the start are worth: reports of the usual size, so that
short prompts are believed as soon as long ones."""
_DOUBTED_FROM = 4.0
"""Times what was expected. A first request that compiles kernels, or an instance that got no
processor for a moment, takes a hundred times as long as the next one will; believed, it would keep
requests away, and with them the reports that say better."""


def nonnegative_least_squares(
    gram: NDArray[np.float64], moment: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Solves ``gram · x = moment`` for x of at least 0: what would be below 0 is left out.

    Args:
        gram: ``[features, features]``, the features' products summed over reports.
        moment: ``[features]``, features times values.
    """
    free = np.ones(len(moment), dtype=np.bool_)
    found = np.zeros(len(moment))
    # Reports that are too few to tell features apart share the value among them.
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
    """Least squares over reports as they come, older ones counting less.

    Features are scaled by the size that they usually have; coefficients stay at least 0.

    Args:
        prior: coefficients to begin with.
        scales: the usual size of each feature.
    """

    def __init__(self, prior: Sequence[float], scales: Sequence[float]) -> None:
        self._scales = np.array(scales, dtype=np.float64)
        self._prior = np.array(prior, dtype=np.float64) * self._scales
        self._gram: NDArray[np.float64] = np.zeros((len(prior), len(prior)))
        self._moment: NDArray[np.float64] = np.zeros(len(prior))
        self._weight = 0.0
        self._found = self._prior
        self._doubted: tuple[NDArray[np.float64], float] | None = None
        self.num_reports = 0

    def report(self, features: Sequence[float], seconds: float) -> None:
        """What something took. A report that is no finite number above 0 is ignored, and one far
        above what was expected waits for the next one: alone it is dropped. Expected is what the
        coefficients say that were last asked for."""
        if not 0 < seconds < float("inf"):
            return
        row = np.array(features) / self._scales
        doubted, self._doubted = self._doubted, None
        if seconds > _DOUBTED_FROM * float(row @ self._found):
            if doubted is None:
                self._doubted = row, seconds
                return
            self._take(*doubted)
        self._take(row, seconds)

    def coefficients(self) -> list[float]:
        """What fits best now, none below 0."""
        usual = np.diag(self._gram) / max(self._weight, 1.0)
        prior = _PRIOR_REPORTS * np.where(usual > 0, usual, 1.0)
        self._found = nonnegative_least_squares(
            self._gram + np.diag(prior), self._moment + prior * self._prior
        )
        return [float(value) for value in self._found / self._scales]

    def _take(self, row: NDArray[np.float64], seconds: float) -> None:
        self._gram = _FORGETTING * self._gram + np.outer(row, row)
        self._moment = _FORGETTING * self._moment + row * seconds
        self._weight = _FORGETTING * self._weight + 1.0
        self.num_reports += 1


class LatencyEstimator:
    """Keeps one instance's latency model up to date.

    Args:
        cold: the model until something was reported.
    """

    def __init__(self, cold: LatencyModel) -> None:
        self._prefill = OnlineFit(cold.prefill_coefficients, (1.0, 4096.0, 4096.0**2))
        self._step = OnlineFit(cold.step_coefficients, (1.0, 16.0, 65536.0))

    def prefilled(self, num_tokens: int, num_reused: int, seconds: float) -> None:
        """A prefill took that long, without waiting and loads."""
        computed, pairs = num_tokens - num_reused, num_tokens**2 - num_reused**2
        self._prefill.report((1.0, computed, pairs), seconds)

    def stepped(self, num_sequences: int, num_context_tokens: int, seconds: float) -> None:
        """A step of decoding took that long."""
        self._step.report((1.0, max(num_sequences - 1, 0), num_context_tokens), seconds)

    def model(self) -> LatencyModel:
        """The costs as they are known now."""
        fixed, per_token, squared = self._prefill.coefficients()
        step, per_sequence, per_context = self._step.coefficients()
        return LatencyModel(fixed, per_token, squared, step, per_sequence, per_context)


class RunningQuantile:
    """A quantile of the last reports.

    Args:
        share: 0 to 1.
        initial: until something was reported.
        window: how many reports count.
    """

    def __init__(self, share: float, initial: float, window: int = 512) -> None:
        self._share = share
        self._initial = initial
        self._window = window
        self._recent: deque[float] = deque()
        self._ordered: list[float] = []

    def report(self, value: float) -> None:
        """One more value."""
        if len(self._recent) == self._window:
            oldest = self._recent.popleft()
            del self._ordered[bisect_left(self._ordered, oldest)]
        self._recent.append(value)
        insort(self._ordered, value)

    @property
    def value(self) -> float:
        """The quantile."""
        if not self._ordered:
            return self._initial
        return self._ordered[min(int(self._share * len(self._ordered)), len(self._ordered) - 1)]
