"""Steps whose tokens are not known yet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from mooncake_engine.scheduling.plan import StepResult


class PendingStep(Protocol):
    """A step that was submitted, or enqueued on a device."""

    def result(self) -> StepResult:
        """What came of it; blocks until the sampled tokens are known. Any thread.

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
