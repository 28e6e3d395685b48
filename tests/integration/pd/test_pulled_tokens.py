"""Cases that only exist where a prefill is read after it has completed."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

from support.pd import GREEDY, Instance, Pair, ask, ask_pair, pair, prefill, prompt_of
from support.push import run_beside_one

from mooncake_engine.messages import FinishReason

run = partial(run_beside_one, pair)
"""Runs a scenario, given a model and the pair's options."""


def test_answer_of_one_token_ends_with_peers_token(model: Path) -> None:
    async def scenario(single: Instance, both: Pair) -> None:
        case = prompt_of(30), replace(GREEDY, max_tokens=1)
        found = await ask_pair(both, *case)
        assert found.tokens == (await ask(single, *case)).tokens
        assert found.finish is FinishReason.LENGTH
        assert both.decode.stat("loads") == 0

    run(model, scenario)


def test_prompt_one_token_short_of_context_length(model: Path) -> None:
    async def scenario(single: Instance, both: Pair) -> None:
        case = prompt_of(511), replace(GREEDY, max_tokens=None)
        found = await ask_pair(both, *case)
        assert found.tokens == (await ask(single, *case)).tokens
        assert (len(found.tokens), found.finish) == (1, FinishReason.LENGTH)

    run(model, scenario)


def test_eos_as_first_token_ends_answer(model: Path) -> None:
    async def scenario(single: Instance, both: Pair) -> None:
        prompt = prompt_of(40)
        first = (await ask(single, prompt)).tokens[0]
        ending = replace(GREEDY, stop_token_ids=(first,), max_tokens=1)
        answer = await ask(both.prefill, prompt, ending, {"do_remote_decode": True})
        assert (answer.tokens, answer.finish, answer.params) == ([first], FinishReason.STOP, None)
        assert both.prefill.stat("leases_held") == 0

    run(model, scenario)


def test_prefill_is_read_at_most_once(model: Path) -> None:
    """The lease ends with the first reader; a second one computes the prompt itself."""

    async def scenario(single: Instance, both: Pair) -> None:
        prompt = prompt_of(50)
        expected = await ask(single, prompt)
        params = await prefill(both.prefill, prompt)
        assert (await ask(both.decode, prompt, GREEDY, params)).tokens == expected.tokens
        assert (await ask(both.decode, prompt, GREEDY, params)).tokens == expected.tokens
        assert both.decode.stat("load_failures") == 1

    run(model, scenario)
