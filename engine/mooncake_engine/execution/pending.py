"""Steps whose tokens are not known yet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from mooncake_engine.scheduling.plan import StepResult
from mooncake_hal.backend import Event


class PendingStep(Protocol):
    """A step that was submitted, or enqueued on a device."""

    def result(self) -> StepResult:
        """What came of it; blocks until the sampled tokens are known and, where there are peers,
        the device is through with the step: one that is not bound to the order of its work may
        write to blocks which are given up then. Any thread.

        Raises:
            EngineDead: from an executor: a rank died or failed; its reason is in the message.
                Nothing can be executed any more.
        """
        ...


@dataclass(frozen=True, slots=True)
class CompletedStep:
    """A PendingStep that is over."""

    outcome: StepResult

    def result(self) -> StepResult:
        """See ``PendingStep``."""
        return self.outcome


@dataclass(frozen=True, slots=True, eq=False)
class UnsampledStep:
    """A PendingStep that the device runs, and of which the host needs no token.

    Args:
        outcome: known already.
        end: recorded behind all of its work.
    """

    outcome: StepResult
    end: Event

    def result(self) -> StepResult:
        """See ``PendingStep``."""
        self.end.synchronize()
        return self.outcome
