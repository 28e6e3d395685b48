"""A peer's KV without a usable first token: only the prompt's last token is computed again."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.scheduling import EOS, Bench, make_request, token_of

from mooncake_engine.messages import TokenLogprobs
from mooncake_engine.scheduling.request import Request
from mooncake_engine.scheduling.step_plan import SampledToken
from mooncake_kv.params import FirstToken, FirstTokenLogprobs

BLOCK = 4


def asking_for_logprobs(name: str, prompt: tuple[int, ...], *, receives_kv: bool) -> Request:
    """A request for logprobs, whose KV is pushed or pulled from a peer."""
    kind = {"receives_kv" if receives_kv else "pulls_kv": True}
    spec = make_request(name, prompt, **kind).spec
    sampling = replace(spec.sampling, logprobs=0)
    return Request(replace(spec, sampling=sampling), 0, 0.0)


@pytest.mark.parametrize("length", [1, 3, 2 * BLOCK, 2 * BLOCK + 1])
@pytest.mark.parametrize("prefix_caching", [True, False])
def test_only_the_last_prompt_token_is_computed(length: int, *, prefix_caching: bool) -> None:
    bench = Bench(block_size=BLOCK, token=None, prefix_caching=prefix_caching)
    bench.add("a", range(length), pulls_kv=True)
    bench.step()
    assert bench.connector.loading == {"a": 0}
    bench.end_load("a", None)
    answer = bench.run()["a"]
    assert answer == [token_of("a", index) for index in range(len(answer))]
    assert bench.worker.num_computed == len(answer), "the prompt's last token and all but one new"
    assert bench.num_free == 16


def test_several_choices_sample_from_one_pulled_prompt() -> None:
    bench = Bench(num_blocks=32, token=None)
    prompt = tuple(range(100, 118))
    bench.add("a", prompt, pulls_kv=True, group="g")
    bench.add("b", prompt, group="g")
    bench.add("c", prompt, group="g")
    for _ in range(3):
        assert bench.step()[0].is_empty, "the prompt that a peer has computed is not computed here"
    bench.end_load("a", None)
    plan, updates = bench.step()
    assert plan.num_tokens == 1
    assert {update.request_id for update in updates} == {"a", "b", "c"}, "all from one step"
    rest = bench.run()
    assert bench.worker.num_computed == 1 + sum(map(len, rest.values()))
    assert bench.num_free == 32


def test_choices_compute_the_prompt_if_the_pull_fails() -> None:
    bench = Bench(num_blocks=32)
    for name, kind in (("a", {"pulls_kv": True}), ("b", {})):
        bench.add(name, tuple(range(18)), group="g", **kind)
    bench.step()
    bench.end_load("a", "the lease has lapsed")
    assert {name: len(tokens) for name, tokens in bench.run().items()} == {"a": 8, "b": 8}


@pytest.mark.parametrize("says_logprobs", [True, False])
def test_pushed_token_is_used_only_with_the_requested_logprobs(*, says_logprobs: bool) -> None:
    bench = Bench(token=None)
    bench.scheduler.add(asking_for_logprobs("a", tuple(range(10)), receives_kv=True))
    bench.step()
    logprobs = FirstTokenLogprobs(-0.5, ()) if says_logprobs else None
    bench.end_load("a", None, FirstToken(EOS, logprobs, num_cached_tokens=3))
    _, [update] = bench.step()
    assert update.num_cached_tokens == 3
    assert update.times is not None
    assert update.times.has_peer_token == says_logprobs
    if says_logprobs:
        assert (update.token_ids, update.logprobs) == ((EOS,), (TokenLogprobs(EOS, -0.5, ()),))
    else:
        assert update.token_ids == (token_of("a", 0),), "sampled here"
        assert bench.worker.num_computed == 1


def test_first_token_sampled_locally_has_logprobs() -> None:
    bench = Bench()
    bench.scheduler.add(asking_for_logprobs("a", tuple(range(10)), receives_kv=False))
    bench.step()
    bench.end_load("a", None)
    plan = bench.submit()
    result = bench.worker.execute(bench.in_flight.popleft())
    entry = TokenLogprobs(7, -0.25, ())
    with_logprobs = replace(result, tokens={"a": (SampledToken(7, entry),)}, plain_tokens={})
    [update] = bench.scheduler.update(plan, with_logprobs)
    assert (update.token_ids, update.logprobs) == ((7,), (entry,))
