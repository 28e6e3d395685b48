"""Helpers of the emulated NPU's tests: instances on it, prompts with unambiguous answers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from support.pd import GREEDY, Answer, Instance, ask, instance, prompt_of, write_model

ON_NPU: dict[str, Any] = {
    "backend": "ascend",
    "block_size": 128,
    "num_kv_blocks": 16,
    "piecewise_graph_max_tokens": 32,  # capturing 512 would take half a second more in every test
}
OVER_HCCS: dict[str, Any] = {
    **ON_NPU,
    "transports": ("hccs",),
    "lease_s": 60.0,
    "transfer_timeout_s": 120.0,
}
FEW = replace(GREEDY, max_tokens=6)
LENGTHS = (1, 17, 127, 128, 129, 300)
"""Lengths of prompts: around a block's 128 tokens, and longer."""

LATENT: dict[str, Any] = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
"""DeepSeek's widths, which are the ones that the attention op supports."""
_CLEAR = 0.1
"""Minimum logprob difference between the two likeliest tokens; bfloat16 rounds logits of a few
units by 0.03."""
_MOST_TRIES = 500
Completer = Callable[[Sequence[int]], Awaitable[list[int]]]
"""Answers a prompt with the sampling parameters FEW; returns the tokens."""


@dataclass
class Case:
    """A prompt, and its answer on the CPU."""

    prompt: tuple[int, ...]
    tokens: list[int]


def write_family(folder: Path, family: str) -> Path:
    """A small random bfloat16 model whose shape the NPU's ops support."""
    overrides = LATENT if family.startswith("deepseek") else {}
    return write_model(folder / family, family, dtype="bfloat16", **overrides)


@asynccontextmanager
async def cpu(model: Path) -> AsyncIterator[Instance]:
    """The model on the CPU backend, which gives the reference answers."""
    async with instance(model, block_size=128, num_kv_blocks=16) as running:
        yield running


async def clear_cases(
    on_cpu: Instance, lengths: Sequence[int] = LENGTHS, others: Sequence[Completer] = ()
) -> list[Case]:
    """A prompt of each length whose answer depends on no near tie, which rounding might decide.

    Args:
        on_cpu: gives the reference answers.
        lengths: of the prompts.
        others: must give the same answers. In a mixture of experts, rounding also decides near ties
            of the router, which no answer shows.
    """
    return [await clear_continuation(on_cpu, (), length, others) for length in lengths]


async def clear_continuation(
    on_cpu: Instance, prompt: tuple[int, ...], length: int, others: Sequence[Completer] = ()
) -> Case:
    """Extend ``prompt`` by ``length`` tokens such that the answer depends on no near tie.

    Raises:
        AssertionError: none of many candidates qualifies, so an instance differs by more than
            rounding.
    """
    for seed in range(_MOST_TRIES):
        longer = (*prompt, *prompt_of(length, seed))
        answer = await ask(on_cpu, longer, replace(FEW, logprobs=2))
        if _least_gap(answer) < _CLEAR:
            continue
        if all([await complete(longer) == answer.tokens for complete in others]):
            return Case(longer, answer.tokens)
    raise AssertionError(f"no answers agree in {_MOST_TRIES} prompts of {length} tokens")


def _least_gap(answer: Answer) -> float:
    return min(
        first - second for (_, first), (_, second) in (each.top[:2] for each in answer.logprobs)
    )
