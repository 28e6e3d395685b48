"""What the tests on the emulated NPU share: instances on it, and prompts with a clear answer."""

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
    "piecewise_graph_max_tokens": 32,  # 512 take half a second more to capture, in every test
}
OVER_HCCS: dict[str, Any] = {
    **ON_NPU,
    "transports": ("hccs",),
    "lease_s": 60.0,
    "transfer_timeout_s": 120.0,
}
FEW = replace(GREEDY, max_tokens=6)
LENGTHS = (1, 17, 127, 128, 129, 300)
"""Of prompts: around a block's 128 tokens, and longer ones."""

LATENT: dict[str, Any] = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
"""The widths of DeepSeek's models, which are the ones that the attention op takes."""
_CLEAR = 0.1
"""Logprobs between the two likeliest tokens; bfloat16 rounds logits of a few units by 0.03."""
_MOST_TRIES = 500
Say = Callable[[Sequence[int]], Awaitable[list[int]]]
"""Answers a prompt as FEW asks; the tokens."""


@dataclass
class Case:
    """A prompt, and its answer on the CPU."""

    prompt: tuple[int, ...]
    tokens: list[int]


def write_family(folder: Path, family: str) -> Path:
    """A small random model in bfloat16, of a shape that an NPU's ops take."""
    overrides = LATENT if family.startswith("deepseek") else {}
    return write_model(folder / family, family, dtype="bfloat16", **overrides)


@asynccontextmanager
async def cpu(model: Path) -> AsyncIterator[Instance]:
    """The model on the CPU backend, which says what the answers are."""
    async with instance(model, block_size=128, num_kv_blocks=16) as running:
        yield running


async def clear_cases(
    on_cpu: Instance, lengths: Sequence[int] = LENGTHS, others: Sequence[Say] = ()
) -> list[Case]:
    """A prompt of each length whose answer hangs on no near tie, which rounding may decide.

    Args:
        on_cpu: says what the answers are.
        lengths: of the prompts.
        others: have to say the same. Where tokens choose experts, rounding decides near ties that
            no answer shows.
    """
    return [await clear_continuation(on_cpu, (), length, others) for length in lengths]


async def clear_continuation(
    on_cpu: Instance, prompt: tuple[int, ...], length: int, others: Sequence[Say] = ()
) -> Case:
    """The same for a prompt that begins so, and goes on for that many tokens.

    Raises:
        AssertionError: there is none among many, so that somebody does not only round otherwise.
    """
    for seed in range(_MOST_TRIES):
        longer = (*prompt, *prompt_of(length, seed))
        answer = await ask(on_cpu, longer, replace(FEW, logprobs=2))
        if _least_gap(answer) < _CLEAR:
            continue
        if all([await say(longer) == answer.tokens for say in others]):
            return Case(longer, answer.tokens)
    raise AssertionError(f"{_MOST_TRIES} prompts of {length} tokens have no answer that all give")


def _least_gap(answer: Answer) -> float:
    return min(
        first - second for (_, first), (_, second) in (each.top[:2] for each in answer.logprobs)
    )
