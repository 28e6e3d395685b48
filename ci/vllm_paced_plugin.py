"""vLLM's CPU build schedules a step ahead, as beside a GPU: for workers whose device is pretended.

Whoever has ``ENTRY_POINT`` among vLLM's general plugins, see ``vllm_contenders.py``.
"""

from __future__ import annotations

from typing import Any

ENTRY_POINT = "schedules_ahead = vllm_paced_plugin:register"


def register() -> None:
    """vLLM's platform for CPUs turns it off; what was decided before stays."""
    from vllm.platforms.cpu import CpuPlatform

    decide = CpuPlatform.check_and_update_config

    def keep(cls: Any, vllm_config: Any) -> None:
        scheduler = vllm_config.scheduler_config
        is_async = scheduler.async_scheduling
        decide(vllm_config)
        scheduler.async_scheduling = is_async

    CpuPlatform.check_and_update_config = classmethod(keep)
