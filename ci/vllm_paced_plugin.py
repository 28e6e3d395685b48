"""Enables async scheduling in vLLM's CPU build, as on a GPU, for workers with a simulated device.

Active for processes with ``ENTRY_POINT`` among vLLM's general plugins; see ``vllm_contenders.py``.
"""

from __future__ import annotations

from typing import Any

ENTRY_POINT = "schedules_ahead = vllm_paced_plugin:register"


def register() -> None:
    """Keep the configured async scheduling, which vLLM's CPU platform would turn off."""
    from vllm.platforms.cpu import CpuPlatform

    decide = CpuPlatform.check_and_update_config

    def keep(cls: Any, vllm_config: Any) -> None:
        scheduler = vllm_config.scheduler_config
        is_async = scheduler.async_scheduling
        decide(vllm_config)
        scheduler.async_scheduling = is_async

    CpuPlatform.check_and_update_config = classmethod(keep)
