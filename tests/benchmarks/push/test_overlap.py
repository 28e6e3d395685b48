"""Overlap of transfer and prefill, over a link on which the transfer takes as long as the prefill.

The metric is the time to the first token that the decode instance computes, from which on the
client receives a stream. A pull delivers the prefill instance's own token earlier, but the next one
waits for all the KV. When the prefill completes, a push has moved nearly all of it, and an early
pull all but the last chunk's.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from statistics import median
from time import monotonic
from typing import Any

import pytest
from support.figures import Figure, record
from support.pd import Answer, Pair, ask_pair, pair, prefill, prompt_of, write_model
from support.push import PushPair, ask_pushed, early_pull_pair, push_pair
from support.throttled_transport import LINK, NAME, install

ROUNDS = 3
PROMPT_TOKENS = 1024
SHAPE = {
    "hidden_size": 512,
    "intermediate_size": 1376,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 2048,
}
KV_BYTES = PROMPT_TOKENS * 12 * 2 * 8 * 64 * 4
WANTED = 1.5
WANTED_EARLY = 1.4
"""With four chunks, only the last one's transfer remains: at best 2 prefill times against 1.25."""

Ask = Callable[[tuple[int, ...]], Awaitable[Answer]]
MakePair = Callable[..., AbstractAsyncContextManager[PushPair]]

OPTIONS = {"transports": (NAME,), "num_kv_blocks": 512, "prefix_caching": False}


@pytest.fixture
def big_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model of some 40 million parameters; the throttled transport is installed."""
    monkeypatch.syspath_prepend(str(install(tmp_path / "plugins")))
    return write_model(tmp_path / "model", **SHAPE)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("chunk", [256, 2048], ids=["chunks", "one-piece"])
def test_push_hides_the_transfer(benchmark: Any, big_model: Path, chunk: int) -> None:
    options = {**OPTIONS, "max_num_batched_tokens": chunk}
    run = (big_model, options, "push", push_pair, WANTED)
    figure = benchmark.pedantic(_compare, args=run, rounds=1)
    record(benchmark, figure)
    assert figure.holds, str(figure)


@pytest.mark.timeout(300)
def test_early_pull_hides_the_transfer(benchmark: Any, big_model: Path) -> None:
    options = {**OPTIONS, "max_num_batched_tokens": 256}
    run = (big_model, options, "early pull", early_pull_pair, WANTED_EARLY)
    figure = benchmark.pedantic(_compare, args=run, rounds=1)
    record(benchmark, figure)
    assert figure.holds, str(figure)


def _compare(
    big_model: Path, options: dict[str, Any], way: str, make_both: MakePair, wanted: float
) -> Figure:
    """Compare a pull with another flow."""
    try:
        seconds, pulled, other = asyncio.run(_measure(big_model, options, make_both))
    finally:
        LINK.bytes_per_s = float("inf")
    context = f"prefill {seconds:.3f} s, pull {pulled:.3f} s, {way} {other:.3f} s"
    name = f"pull / {way}, time to D's token, steps of {options['max_num_batched_tokens']}"
    return Figure(name, pulled / other, wanted, "times", context=context)


async def _measure(
    model: Path, options: dict[str, Any], make_both: MakePair
) -> tuple[float, float, float]:
    """Seconds of a prefill, and until D's first token by pull and by the other flow, one after
    another."""
    async with pair(model, **options) as of_pull, make_both(model, **options) as of_other:
        prompts = (prompt_of(PROMPT_TOKENS, seed=seed) for seed in itertools.count())
        prefills = [await _prefill_s(of_pull, next(prompts)) for _ in range(ROUNDS + 1)]
        LINK.bytes_per_s = KV_BYTES / median(prefills[1:])
        pulls, others = [], []
        for _ in range(ROUNDS + 1):
            pulls.append(
                await _own_token_s(lambda prompt: ask_pair(of_pull, prompt), next(prompts))
            )
            others.append(
                await _own_token_s(lambda prompt: ask_pushed(of_other, prompt), next(prompts))
            )
        assert of_pull.decode.stat("load_failures") == of_other.decode.stat("load_failures") == 0
    return median(prefills[1:]), median(pulls[1:]), median(others[1:])


async def _prefill_s(of: Pair, prompt: tuple[int, ...]) -> float:
    began = monotonic()
    params = await prefill(of.prefill, prompt)
    elapsed = monotonic() - began
    of.prefill.engine.abort(params["remote_request_id"])
    return elapsed


async def _own_token_s(ask: Ask, prompt: tuple[int, ...]) -> float:
    began = monotonic()
    answer = await ask(prompt)
    return answer.arrived_at[1] - began
