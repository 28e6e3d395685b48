"""Several choices of a prompt whose KV is pushed into one reservation: the others share it."""

from __future__ import annotations

import pytest
from support.scheduling import Bench

from mooncake_kv.params import FirstToken

PROMPT = tuple(range(100, 118))


def three_choices(bench: Bench) -> None:
    bench.add("a", PROMPT, receives_kv=True, group="g")
    bench.add("b", PROMPT, group="g")
    bench.add("c", PROMPT, group="g")


def test_other_choices_wait_for_the_prompt_and_compute_its_last_token() -> None:
    bench = Bench(num_blocks=32, token=None)
    three_choices(bench)
    for _ in range(3):
        assert bench.step()[0].is_empty, "the prompt that a peer computes is not computed here"
    bench.end_load("a", None, FirstToken(60))
    assert {len(tokens) for tokens in bench.run().values()} == {8}
    first_steps = bench.worker.num_computed
    assert first_steps < len(PROMPT) + 3 * 8, "the prompt was not computed here"
    assert bench.num_free == 32


def test_prompt_is_computed_locally_if_the_push_fails() -> None:
    bench = Bench(num_blocks=32)
    three_choices(bench)
    bench.step()
    bench.end_load("a", "the peer died")
    answers = bench.run()
    assert {name: len(tokens) for name, tokens in answers.items()} == dict.fromkeys("abc", 8)


@pytest.mark.parametrize("is_loaded", [False, True])
def test_other_choices_continue_when_the_first_is_aborted(*, is_loaded: bool) -> None:
    bench = Bench(num_blocks=32)
    three_choices(bench)
    bench.step()
    bench.scheduler.abort("a")
    bench.end_load("a", None if is_loaded else "aborted", FirstToken(60))
    answers = bench.run()
    assert {len(answers[name]) for name in "bc"} == {8}
    assert bench.num_free == 32
