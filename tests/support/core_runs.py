"""Runs a whole load through a real core and collects its updates and statistics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from mooncake_engine.assembly import build_engine
from mooncake_engine.config import EngineConfig
from mooncake_engine.core import EngineCore
from mooncake_engine.core_messages import AddRequest
from mooncake_engine.data_parallel_core import DataParallelCore
from mooncake_engine.messages import EngineRequest, EngineStats, TokenUpdate
from mooncake_engine.sampling_params import SamplingParams

PROMPT_TOKENS = 37
"""Two blocks of 16 tokens and part of a third."""


@dataclass(frozen=True)
class Outcome:
    """The result of a load.

    Args:
        updates: each request's updates, in order.
        stats: the engine's statistics after the last request.
    """

    updates: dict[str, list[TokenUpdate]]
    stats: EngineStats

    @property
    def answers(self) -> dict[str, list[int]]:
        """Every request's tokens."""
        return {
            name: [token_id for update in updates for token_id in update.token_ids]
            for name, updates in self.updates.items()
        }


def random_prompt(number: int, length: int = PROMPT_TOKENS) -> tuple[int, ...]:
    """Random token ids from 3 to 299, the same for the same number."""
    generator = torch.Generator().manual_seed(number)
    return tuple(torch.randint(3, 300, (length,), generator=generator).tolist())


def make_load(sampling: SamplingParams, *, sizes: Sequence[int]) -> list[EngineRequest]:
    """Requests with ``sizes[i]`` answers for prompt i; each answer has its own seed."""
    return [
        EngineRequest(
            f"p{number}-{index}",
            random_prompt(number),
            replace(sampling, ignore_eos=True, seed=100 * number + index),
            group=f"p{number}" if size > 1 else None,
        )
        for number, size in enumerate(sizes)
        for index in range(size)
    ]


def run_load(checkpoint: Path, requests: Sequence[EngineRequest], **options: Any) -> Outcome:
    """Serve requests that arrive at once; the block accounting is audited after every step.

    Args:
        checkpoint: the model's directory.
        requests: the requests to serve.
        options: fields of ``EngineConfig``.
    """
    options = {"swap_space_bytes": 4 << 20, "dtype": "float32", "threads": 1, **options}
    core = build_engine(EngineConfig(checkpoint, **options)).core
    try:
        return serve_all(core, requests)
    finally:
        core.close()


def serve_all(core: EngineCore | DataParallelCore, requests: Sequence[EngineRequest]) -> Outcome:
    """Serve requests that arrive at once with a core that is already running."""
    updates: dict[str, list[TokenUpdate]] = {request.request_id: [] for request in requests}
    for request in requests:
        core.post(AddRequest(request))
    num_live = len(requests)
    while num_live:
        for update in core.step():
            updates[update.request_id].append(update)
            num_live -= update.finish is not None
        core.check_integrity()
    return Outcome(updates, core.report().stats)
