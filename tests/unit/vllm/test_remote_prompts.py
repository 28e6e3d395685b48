"""A prompt held by a peer is loaded once, by one choice, whichever siblings start and end."""

from __future__ import annotations

from mooncake_vllm.remote_prompts import RemotePrompts

LEASE = ("peer", "lease")
PROMPT = [*range(100)]


def test_first_choice_of_prompt_is_announced_and_siblings_are_not() -> None:
    prompts = RemotePrompts()
    assert prompts.expect("a", LEASE, PROMPT)
    assert not prompts.expect("b", LEASE, PROMPT)
    assert prompts.expect("c", ("peer", "another"), PROMPT)


def test_siblings_wait_for_loading_choice_and_load_nothing() -> None:
    prompts = RemotePrompts()
    for name in "ab":
        prompts.expect(name, LEASE, PROMPT)
    assert prompts.num_to_load("b", 64) == 36
    assert not prompts.is_loading
    assert prompts.begin("b") == "a"
    assert prompts.is_loading
    assert prompts.num_to_load("a", 0) is None
    assert prompts.begin("a") is None
    assert prompts.end("a") == "b"
    assert not prompts.is_loading
    assert prompts.num_to_load("a", 0) == 0
    assert prompts.num_to_load("b", 0) == 0  # asked again after preemption or a failure
    assert prompts.end("a") is None


def test_siblings_wait_until_prefix_cache_has_loaded_blocks() -> None:
    prompts = RemotePrompts()
    for name in "ab":
        prompts.expect(name, LEASE, PROMPT)
    prompts.begin("a")
    assert prompts.end("a", is_loaded=True) == "a"
    assert prompts.num_to_load("b", 0) is None
    assert prompts.num_to_load("a", 0) == 0
    assert prompts.skip("a") is None  # vLLM runs the request
    assert prompts.num_to_load("b", 0) == 0


def test_siblings_do_not_wait_for_aborted_or_failed_choice() -> None:
    for leaves_first in (False, True):
        prompts = RemotePrompts()
        for name in "ab":
            prompts.expect(name, LEASE, PROMPT)
        prompts.begin("a")
        if leaves_first:
            assert prompts.leave("a") == "a"
            assert prompts.end("a", is_loaded=True) == "a"
        else:
            assert prompts.end("a", is_loaded=True) == "a"
            assert prompts.leave("a") is None
        assert prompts.num_to_load("b", 0) == 0


def test_last_token_alone_is_not_loaded() -> None:
    prompts = RemotePrompts()
    prompts.expect("a", LEASE, PROMPT)
    assert [prompts.num_to_load("a", have) for have in (0, 98, 99, 100)] == [100, 2, 0, 0]
    assert prompts.skip("a") == "a"
    assert prompts.skip("a") is None
    assert prompts.num_to_load("a", 0) == 0


def test_unknown_request_loads_nothing() -> None:
    prompts = RemotePrompts()
    assert (prompts.num_to_load("x", 0), prompts.begin("x"), prompts.skip("x")) == (0, None, None)
    assert (prompts.end("x"), prompts.leave("x")) == (None, None)


def test_lease_lost_in_queue_ends_no_load() -> None:
    prompts = RemotePrompts()
    prompts.expect("a", LEASE, PROMPT)
    assert prompts.end("a") is None
    assert prompts.begin("a") is None


def test_last_sibling_cancels_prompt_that_was_not_loaded() -> None:
    prompts = RemotePrompts()
    for name in "ab":
        prompts.expect(name, LEASE, PROMPT)
    assert prompts.leave("a") is None
    assert prompts.leave("b") == "a"
    assert len(prompts) == 0


def test_request_that_ends_while_it_loads_is_still_reported_once() -> None:
    prompts = RemotePrompts()
    for name in "ab":
        prompts.expect(name, LEASE, PROMPT)
    prompts.begin("a")
    assert prompts.leave("a") == "a"
    assert prompts.leave("b") is None
    assert prompts.end("a") == "a"
    assert prompts.end("a") is None
    assert len(prompts) == 0


def test_name_can_be_reused_after_all_siblings_have_left() -> None:
    prompts = RemotePrompts()
    prompts.expect("a", LEASE, PROMPT)
    prompts.begin("a")
    prompts.end("a")
    prompts.leave("a")
    assert prompts.expect("a", LEASE, PROMPT)
