"""Layerwise push gives the tokens of one instance."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.pd import GREEDY, Instance, ask, prompt_of
from support.push import PushPair, ask_pushed, push_pair, run_beside_one

from mooncake_engine.messages import FinishReason
from mooncake_kv.push_worker import PushWorker

slow = pytest.mark.slow
CHUNK = 64
"""Tokens per step, so that longer prompts are prefilled, and sent, in several."""

run = partial(run_beside_one, push_pair)
"""Runs a scenario, given a model and the pair's options."""


async def check_same_answers(single: Instance, both: PushPair) -> None:
    """Compare the answers to prompts of one chunk and of several."""
    for length in (1, 33, 200):
        prompt = prompt_of(length)
        expected = await ask(single, prompt)
        assert (await ask_pushed(both, prompt)).tokens == expected.tokens
    assert both.decode.stat("load_failures") == 0


@pytest.mark.parametrize(
    ("prefill_tp", "decode_tp"),
    [(1, 2), (2, 1), *(pytest.param(*pair, marks=slow) for pair in ((2, 2), (3, 2), (4, 2)))],
)
def test_tensor_parallel_pairs(model: Path, prefill_tp: int, decode_tp: int) -> None:
    sizes = {"tp_size": prefill_tp}, {"tp_size": decode_tp}
    run(model, check_same_answers, prefill=sizes[0], decode=sizes[1], max_num_batched_tokens=CHUNK)


def test_piecewise_graphs(model: Path) -> None:
    """Layers are reported between the graphs, on both ranks."""

    async def scenario(single: Instance, both: PushPair) -> None:
        await check_same_answers(single, both)
        assert both.decode.stat("bytes_received") == both.prefill.stat("bytes_sent") > 0

    options = {"max_num_batched_tokens": CHUNK, "piecewise_graph_max_tokens": CHUNK}
    run(model, scenario, prefill={"tp_size": 2}, **options)


def test_answer_ending_with_first_token(model: Path) -> None:
    """The answer ends by length, by a stop token, and by the end of the context."""

    async def scenario(single: Instance, both: PushPair) -> None:
        prompt = prompt_of(40)
        first = (await ask(single, prompt)).tokens[0]
        ending = replace(GREEDY, stop_token_ids=(first,))
        for case, finish in (
            ((prompt, replace(GREEDY, max_tokens=1)), FinishReason.LENGTH),
            ((prompt, ending), FinishReason.STOP),
            ((prompt_of(511), replace(GREEDY, max_tokens=None)), FinishReason.LENGTH),
        ):
            found = await ask_pushed(both, *case)
            assert found.tokens == (await ask(single, *case)).tokens
            assert (len(found.tokens), found.finish) == (1, finish)

    run(model, scenario)


@pytest.mark.parametrize("heard", [(), (1,)], ids=["none", "the second"])
def test_layer_whose_hook_did_not_fire_is_sent_at_end(
    model: Path, monkeypatch: pytest.MonkeyPatch, heard: tuple[int, ...]
) -> None:
    layer_done = PushWorker._layer_done

    def miss(worker: PushWorker, active: Any, index: int) -> None:
        if index in heard:
            layer_done(worker, active, index)

    monkeypatch.setattr(PushWorker, "_layer_done", miss)

    async def scenario(single: Instance, both: PushPair) -> None:
        for length in (1, 200):
            prompt = prompt_of(length)
            assert (await ask_pushed(both, prompt)).tokens == (await ask(single, prompt)).tokens
        assert both.decode.stat("load_failures") == 0

    run(model, scenario, max_num_batched_tokens=CHUNK)
