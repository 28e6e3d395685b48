"""Every pair of instance sizes: prefill and decode with different numbers of stages and ranks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from support.metaserver import metaserver
from support.pd import (
    GREEDY,
    Answer,
    Instance,
    Pair,
    ask,
    ask_pair,
    instance,
    prompt_of,
    write_model,
)
from support.push import LAYERWISE, PushPair, ask_pushed

from mooncake_engine.config import Role

PULL = "MooncakeConnector"
SIZES = ("1", "2", "3", "4", "6", "8")
"""Tensor-parallel ranks per stage; see ``read_size``."""
PIPELINES = ("2x1", "2x2")
EXPERT_SIZES = ("1", "2", "2e2", "4e2", "4e4", "2d1", "2d1e2", "4d1e4", "2d2e4")
"""Data-parallel ranks, tensor-parallel ranks of each, and the expert-parallel size."""
NUM_HEADS = 24
LENGTHS = (1, 16, 33, 100, 129, 200)
SAMPLING = replace(GREEDY, max_tokens=6)
TOKENS_IN_POOL = 8192
OPTIONS = {"lease_s": 20.0, "max_num_batched_tokens": 96}

_GROUPED = {"hidden_size": NUM_HEADS * 8, "head_dim": 8, "num_attention_heads": NUM_HEADS}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "24-heads": ("llama", {**_GROUPED, "num_key_value_heads": 24}),
    "2-heads": ("llama", {**_GROUPED, "num_key_value_heads": 2}),
    "latent": (
        "deepseek_v3",
        {"num_attention_heads": NUM_HEADS, "num_key_value_heads": NUM_HEADS, "head_dim": 16}
        | {"kv_lora_rank": 24, "qk_nope_head_dim": 8, "qk_rope_head_dim": 16, "v_head_dim": 8}
        | {"first_k_dense_replace": 2},  # experts hold no KV
    ),
    "experts": ("qwen3_moe", {}),
    "latent-experts": ("deepseek_v3", {}),
}
"""Family and shape by name: a head per rank, fewer heads than ranks, one latent for all; and two
with experts, for EXPERT_SIZES."""
EXPERT_MODELS = ("experts", "latent-experts")

Ask = Callable[[tuple[int, ...]], Awaitable[Answer]]


@dataclass(frozen=True)
class Question:
    """A prompt and a single instance's answer to it."""

    prompt: tuple[int, ...]
    expected: tuple[int, ...]


def read_size(name: str) -> dict[str, int]:
    """The options of a size: ``3`` is three ranks, ``2x3`` two stages of three, ``4e2`` four ranks
    with expert parallelism in two parts, which dispatches prompts but not decodes, and ``2d1e2``
    two data-parallel ranks of one rank each with experts in two parts.

    Raises:
        ValueError: the name has none of these forms.
    """
    copies, is_parallel, name = name.rpartition("d")
    stages, is_pipeline, rest = name.rpartition("x")
    ranks, is_divided, parts = rest.partition("e")
    options = {"pp_size": int(stages) if is_pipeline else 1, "tp_size": int(ranks)}
    if is_parallel:
        options["dp_size"] = int(copies)
    if is_divided:
        options |= {"ep_size": int(parts), "ep_dispatch_min_tokens": 16}
    return options


def write_grid_model(directory: Path, name: str) -> Path:
    """One of MODELS with a number of query heads that any of SIZES divides."""
    family, shape = MODELS[name]
    return write_model(directory, family, **shape)


async def make_questions(single: Instance, seed: int) -> list[Question]:
    """Prompts of all LENGTHS, different for each seed, so that no instance has their KV cached."""
    prompts = [prompt_of(length, seed=seed) for length in LENGTHS]
    answers = await asyncio.gather(*(ask(single, prompt, SAMPLING) for prompt in prompts))
    return [Question(p, tuple(a.tokens)) for p, a in zip(prompts, answers, strict=True)]


@asynccontextmanager
async def side(
    model: Path, role: Role, connector: str, *, size: str, block_size: int
) -> AsyncIterator[Instance]:
    """One instance of a grid."""
    options: dict[str, Any] = {**OPTIONS, "connector": connector, **read_size(size)}
    num_blocks = TOKENS_IN_POOL // block_size
    async with instance(
        model, role, block_size=block_size, num_kv_blocks=num_blocks, **options
    ) as running:
        yield running


async def check_pair(both: Pair, questions: Sequence[Question]) -> None:
    """Check that answers equal the single instance's, that KV was transferred and all released.

    The prefill instance may be serving others: the caller checks that it is clean.

    Raises:
        AssertionError: a check failed.
    """
    received = both.decode.stat("bytes_received")
    async with asker(both) as ask_both:
        first = await ask_both(questions[-1].prompt)
        answers = await asyncio.gather(*(ask_both(question.prompt) for question in questions))
    for question, answer in zip((*questions, questions[-1]), (*answers, first), strict=True):
        assert tuple(answer.tokens) == question.expected, f"wrong tokens: {answer}, {question}"
    assert both.decode.stat("load_failures") == 0, "a load failed"
    assert both.decode.stat("bytes_received") > received, "no KV was transferred"
    await both.decode.check_clean(30.0)


@asynccontextmanager
async def asker(both: Pair) -> AsyncIterator[Ask]:
    """How a pair is asked: by pull or by push."""
    kv_transfer = both.decode.engine.config.kv_transfer
    assert kv_transfer is not None
    if kv_transfer.connector != LAYERWISE:
        yield lambda prompt: ask_pair(both, prompt, SAMPLING)
        return
    pushed = PushPair(both)
    async with metaserver(pushed.dispatch) as pushed.metaserver:
        yield lambda prompt: ask_pushed(pushed, prompt, SAMPLING)
