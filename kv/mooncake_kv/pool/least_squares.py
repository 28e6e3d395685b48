"""Linear cost models with exponential forgetting, learnt from measured durations. Used by
``pool_costs``.

Each sample is (features, seconds). Its weight decays with time, so that costs measured under an
earlier load fade. When hardly any weight is left the prior is used again, so that a source that
looked too slow is tried again. Pure: the clock is an argument.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

HALF_LIFE_S = 60.0
MIN_WEIGHT = 0.05
"""Total weight of the samples below which the prior is used instead."""


class FadingLeastSquares:
    """Estimates ``seconds = weights . features`` with non-negative weights.

    Args:
        prior: samples (features, seconds) to use while there are no others.
        half_life_s: seconds after which a sample counts half.
    """

    def __init__(
        self,
        prior: Sequence[tuple[Sequence[float], float]],
        *,
        half_life_s: float = HALF_LIFE_S,
    ) -> None:
        width = len(prior[0][0])
        self._prior = (np.zeros((width, width)), np.zeros(width))
        self._learnt = (np.zeros((width, width)), np.zeros(width))
        self._weight = 0.0
        self._half_life_s = half_life_s
        self._newest: float | None = None
        self._weights: np.ndarray | None = None
        for features, seconds in prior:
            self._add(self._prior, features, seconds)

    @property
    def has_learnt(self) -> bool:
        """Whether there are samples other than the prior's."""
        return self._weight >= MIN_WEIGHT

    def learn(self, features: Sequence[float], seconds: float, now: float) -> None:
        """Add a sample. Relative errors are minimized, so that short and long durations count
        alike."""
        if self._newest is not None:
            self._fade(now)
        self._newest = now
        self._weight += 1.0
        self._add(self._learnt, features, seconds)
        self._weights = None

    def estimate(self, features: Sequence[float], now: float) -> float:
        """Estimated seconds for these features, at least 0."""
        if self._newest is not None and now - self._newest > self._half_life_s / 8:
            self._fade(now)
            self._newest = now
            self._weights = None
        if self._weights is None:
            self._weights = self._solve()
        return float(np.dot(self._weights, features))

    def _fade(self, now: float) -> None:
        assert self._newest is not None, "what was never learnt does not fade"
        factor = 0.5 ** (max(now - self._newest, 0.0) / self._half_life_s)
        self._weight *= factor
        for array in self._learnt:
            array *= factor

    @staticmethod
    def _add(
        sums: tuple[np.ndarray, np.ndarray], features: Sequence[float], seconds: float
    ) -> None:
        row = np.asarray(features, np.float64)
        weight = max(seconds, 1e-6) ** -2  # so that residuals are relative
        sums[0][...] += weight * np.outer(row, row)
        sums[1][...] += weight * seconds * row

    def _solve(self) -> np.ndarray:
        """Least squares over the features whose weights come out positive."""
        matrix, vector = self._learnt if self.has_learnt else self._prior
        weights = np.zeros(len(vector))
        active = np.arange(len(vector))
        while len(active):
            scale = 1.0 / np.sqrt(np.maximum(matrix[active, active], 1e-300))
            scaled = matrix[np.ix_(active, active)] * np.outer(scale, scale)
            found = np.linalg.lstsq(scaled, vector[active] * scale, rcond=1e-9)[0] * scale
            if (found >= 0).all():
                weights[active] = found
                break
            active = np.delete(active, found.argmin())
        return weights
