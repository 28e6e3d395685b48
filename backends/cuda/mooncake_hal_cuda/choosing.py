"""Which implementation an attention op runs on: chosen once per model shape, by what was measured.

Nothing is taken on trust: another implementation is used only if its result is that of our kernel.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mooncake_hal.errors import CapabilityError

logger = logging.getLogger(__name__)

AUTO = "auto"
OURS = "triton"
NAMES = (AUTO, OURS, "sdpa", "varlen", "flashinfer")
MARGIN = 0.9
"""A library must take no more of our kernel's time: else two instances would choose by noise."""


@dataclass(frozen=True, slots=True)
class Trial:
    """How a candidate did.

    Args:
        name: its name.
        milliseconds: of one call, or None if it can't be used.
        refusal: why not.
    """

    name: str
    milliseconds: float | None
    refusal: str = ""


@dataclass(frozen=True, slots=True)
class Choice:
    """The chosen implementation, and why."""

    name: str
    reason: str


def choose(wanted: str, trials: Sequence[Trial]) -> Choice:
    """The fastest of the usable ones, ours unless one is clearly faster; or what was asked for.

    Args:
        wanted: the name of a trial, or AUTO.
        trials: of all candidates, our kernel among them.

    Raises:
        CapabilityError: what was asked for can't be used; the message says why.
    """
    by_name = {trial.name: trial for trial in trials}
    if wanted != AUTO:
        trial = by_name[wanted]
        if trial.milliseconds is None:
            raise CapabilityError(
                f"attention by {wanted!r} was asked for (MOONCAKE_HAL_CUDA_ATTENTION), but "
                f"{trial.refusal}; use 'auto'"
            )
        return Choice(wanted, "it was asked for")
    timed = {t.name: t.milliseconds for t in trials if t.milliseconds is not None}
    best = min(timed, key=lambda name: timed[name] * (MARGIN if name == OURS else 1.0))
    return Choice(best, "; ".join(_describe(trial) for trial in trials))


def _describe(trial: Trial) -> str:
    if trial.milliseconds is None:
        return f"{trial.name}: {trial.refusal}"
    return f"{trial.name}: {trial.milliseconds:.3f} ms"


class Chooser:
    """Remembers what was chosen for each op and shape.

    Args:
        wanted: one of NAMES.
    """

    def __init__(self, wanted: str) -> None:
        self.wanted = wanted
        self._chosen: dict[object, str] = {}

    def pick(self, op: str, shape: object, tries: Callable[[], Sequence[Trial]] | None) -> str:
        """The name to use; the first call of a shape makes the trials, and logs the choice.

        Args:
            op: name of the op.
            shape: what the speed depends on.
            tries: makes the trials; None if this is no time for them, for now it is our kernel.
        """
        key = (op, shape)
        if key in self._chosen:
            return self._chosen[key]
        if tries is None:
            return OURS
        choice = choose(self.wanted, tries())
        logger.info("%s of %s runs on %s: %s", op, shape, choice.name, choice.reason)
        self._chosen[key] = choice.name
        return choice.name
