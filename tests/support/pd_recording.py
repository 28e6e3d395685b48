"""A pull connector that remembers the steps of the instances that use it."""

from __future__ import annotations

from dataclasses import replace

from mooncake_engine.execution.extension import LayerDone
from mooncake_engine.kv_transfer.base import CONNECTORS
from mooncake_engine.kv_transfer.pull_worker import PullWorker
from mooncake_engine.scheduling.plan import StepPlan

NAME = "RecordingConnector"
ENTRY = replace(CONNECTORS["MooncakeConnector"], worker="support.pd_recording:RecordingWorker")
PLANS: list[StepPlan] = []
"""What every instance of this process that uses it has run."""


class RecordingWorker(PullWorker):
    """Pulls, and keeps the plans."""

    def begin_step(self, plan: StepPlan) -> LayerDone | None:
        PLANS.append(plan)
        return super().begin_step(plan)
