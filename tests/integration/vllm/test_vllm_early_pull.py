"""D reserves blocks, and reads the KV that P computes for them: early pulls, through the pull
connector's two sides without vLLM.

D posts its reservation to a metaserver, which sends P the request, as a proxy does.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.metaserver import Post
from support.vllm_caches import filled_ranks, whole_prompt
from support.vllm_instance import DEADLINE_S, FakeRequest, FakeVllm, running

from mooncake_hal.kv.geometry import AttentionKind
from mooncake_kv.config import KVTransferConfig
from mooncake_vllm.vllm_memory import ModelKV

MODEL = ModelKV(AttentionKind.GQA, 2, 4, (8, 8), "float32")
CONFIG = KVTransferConfig(transports=("tcp",), advertise_host="127.0.0.1")
PATIENT = replace(CONFIG, lease_s=600.0)
"""D would wait this long for a P that does not report."""
PROMPT = list(range(100, 114))
P_BLOCKS, OTHER_BLOCKS, D_BLOCKS = [5, 1, 4, 2], [7, 3, 6, 5], [3, 0, 6, 1]


def start(
    stack: ExitStack, folder: Path, config: KVTransferConfig = CONFIG
) -> tuple[FakeVllm, FakeVllm]:
    first, second = (filled_ranks(MODEL, "LBHNC", 1, seed=seed) for seed in (1, 2))
    return (
        stack.enter_context(running("p", folder, first, config)),
        stack.enter_context(running("d", folder, second, config)),
    )


def waiting_params(post: Post, name: str) -> dict[str, object]:
    """The params of a request whose D reserves blocks and pulls."""
    return {"do_remote_prefill": True, "do_pull": True, "metaserver": post.server.url(name)}


def expect(decode: FakeVllm, post: Post, name: str = "d") -> FakeRequest:
    """Have D receive a request and reserve blocks for it."""
    request = FakeRequest(name, PROMPT, waiting_params(post, name))
    decode.scheduler.on_new_request(request)
    assert decode.admit(request, D_BLOCKS) == len(PROMPT)
    decode.step()
    return request


def begin(prefill: FakeVllm, post: Post, name: str = "p") -> FakeRequest:
    """Have P receive the prefill that D asked for."""
    request = FakeRequest(name, PROMPT, {"do_remote_decode": True} | post.wait())
    prefill.scheduler.on_new_request(request)
    return request


def wait_for_holder(decode: FakeVllm, request_id: str) -> None:
    """Wait until D knows which of P's requests computes its prompt."""
    connector: Any = decode.scheduler._connector
    receiver = connector._early_receiver
    reserved = receiver._reserved["d"]
    while reserved.newest is None or reserved.newest.holder.request_id != request_id:
        decode.step()


def check_arrival(
    prefill: FakeVllm, decode: FakeVllm, blocks: list[int], request_id: str = "p"
) -> None:
    """Wait until the KV of one of P's requests has arrived, and compare it."""
    decode.step_until(decode.reports.received, "d")
    prefill.step_until(prefill.reports.sent, request_id)
    assert not decode.reports.failed
    found, wanted = whole_prompt(decode.caches, D_BLOCKS), whole_prompt(prefill.caches, blocks)
    assert (found[:, :, : len(PROMPT)] == wanted[:, :, : len(PROMPT)]).all()


def test_prompt_is_pulled_into_reserved_blocks(
    stack: ExitStack, tmp_path: Path, post: Post
) -> None:
    prefill, decode = start(stack, tmp_path)
    expect(decode, post)
    request = begin(prefill, post)
    assert prefill.compute(request, P_BLOCKS, (3, 9, 14)) == (True, None)
    check_arrival(prefill, decode, P_BLOCKS)


def test_prompt_is_pulled_in_parts_while_it_is_computed(
    stack: ExitStack, tmp_path: Path, post: Post
) -> None:
    """As from a P that reports each chunk, which vLLM's does not."""
    prefill, decode = start(stack, tmp_path)
    expect(decode, post)
    request = begin(prefill, post)
    sender, receiver = prefill.scheduler._connector, decode.scheduler._connector
    bytes_read = 0.0
    for stop in (4, 8):
        sender.prefill_advanced("p", P_BLOCKS, stop, 0)
        deadline = time.monotonic() + DEADLINE_S
        while receiver.stats()["bytes_received_early"] == bytes_read:
            assert time.monotonic() < deadline, f"the part that ends at {stop} is not read"
            decode.step()
        bytes_read = receiver.stats()["bytes_received_early"]
    assert prefill.compute(request, P_BLOCKS, (14,)) == (True, None)
    check_arrival(prefill, decode, P_BLOCKS)


def test_prefill_that_ends_with_its_first_token_is_pulled(
    stack: ExitStack, tmp_path: Path, post: Post
) -> None:
    """D waits for it: unlike after a pull, no proxy can decide that no D is needed."""
    prefill, decode = start(stack, tmp_path)
    expect(decode, post)
    request = begin(prefill, post)
    request.num_computed_tokens, request.output_token_ids = len(PROMPT), [7]
    request.status = SimpleNamespace(name="FINISHED_STOPPED")
    assert prefill.finish(request, P_BLOCKS) == (True, None)
    check_arrival(prefill, decode, P_BLOCKS)


@pytest.mark.parametrize("has_run", [False, True], ids=["before it runs", "when it has run"])
@pytest.mark.parametrize("is_known", [False, True], ids=["at once", "while D waits"])
def test_aborted_prefill_fails_the_load(
    stack: ExitStack, tmp_path: Path, post: Post, is_known: bool, has_run: bool
) -> None:
    prefill, decode = start(stack, tmp_path)
    expect(decode, post)
    request = begin(prefill, post)
    if is_known:
        wait_for_holder(decode, "p")
    if has_run:
        prefill.run(request, P_BLOCKS, (3,))
    request.status.name = "FINISHED_ABORTED"
    assert prefill.finish(request, P_BLOCKS[:1]) == (has_run, None)
    decode.step_until(decode.reports.received, "d")
    if has_run:
        prefill.step_until(prefill.reports.sent, "p")
    assert decode.reports.failed == {"d"}
    assert prefill.scheduler.stats()["leases_held"] == 0


@pytest.mark.parametrize(
    "changes",
    [{"prompt_token_ids": PROMPT[:-1]}, {"mm_features": ["a picture"]}],
    ids=["another prompt", "a picture"],
)
def test_prefill_that_refuses_the_params_fails_the_load(
    stack: ExitStack, tmp_path: Path, post: Post, changes: dict[str, Any]
) -> None:
    prefill, decode = start(stack, tmp_path, config=PATIENT)
    expect(decode, post)
    request = FakeRequest("p", PROMPT, {"do_remote_decode": True} | post.wait())
    request = replace(request, **changes)
    prefill.scheduler.on_new_request(request)
    decode.step_until(decode.reports.received, "d")
    assert decode.reports.failed == {"d"}
    assert prefill.scheduler.num_refused == 1
    assert prefill.finish(request, P_BLOCKS) == (False, None)
    prefill.step()
    assert not prefill.reports.sent


@pytest.mark.parametrize("late", ["completes", "is aborted"])
def test_earlier_attempt_at_the_same_p_does_not_reach_the_next_one(
    stack: ExitStack, tmp_path: Path, post: Post, late: str
) -> None:
    """The proxy has lost the connection of the first attempt, which P still computes."""
    prefill, decode = start(stack, tmp_path)
    expect(decode, post)
    first = begin(prefill, post, "p")
    wait_for_holder(decode, "p")
    second = begin(prefill, post, "p-1")
    wait_for_holder(decode, "p-1")
    if late == "completes":
        assert prefill.compute(first, OTHER_BLOCKS, (14,)) == (True, None)
    else:
        prefill.run(first, OTHER_BLOCKS, (3,))
        first.status.name = "FINISHED_ABORTED"
        prefill.finish(first, OTHER_BLOCKS)
    prefill.step_until(prefill.reports.sent, "p")
    assert not decode.reports.received, "D waits for the second attempt"
    assert prefill.compute(second, P_BLOCKS, (14,)) == (True, None)
    check_arrival(prefill, decode, P_BLOCKS, "p-1")


def test_attempt_after_the_load_has_ended_frees_its_blocks(
    stack: ExitStack, tmp_path: Path, post: Post
) -> None:
    prefill, decode = start(stack, tmp_path)
    waiting = expect(decode, post)
    first = begin(prefill, post, "p")
    first.status.name = "FINISHED_ABORTED"
    prefill.finish(first, P_BLOCKS)
    decode.step_until(decode.reports.received, "d")
    second = begin(prefill, post, "p-1")
    assert prefill.compute(second, OTHER_BLOCKS, (14,)) == (True, None)
    prefill.step_until(prefill.reports.sent, "p-1")
    decode.scheduler.request_finished(waiting, [D_BLOCKS])
    again = replace(waiting, kv_transfer_params=waiting_params(post, "again"))
    decode.scheduler.on_new_request(again)
    assert decode.admit(again, D_BLOCKS) == len(PROMPT), "the URL tells attempts apart"


def test_aborted_decode_frees_both_sides(stack: ExitStack, tmp_path: Path, post: Post) -> None:
    prefill, decode = start(stack, tmp_path)
    waiting = expect(decode, post)
    request = begin(prefill, post)
    assert decode.scheduler.request_finished(waiting, [D_BLOCKS]) == (False, None)
    decode.step_until(decode.reports.received, "d")
    prefill.compute(request, P_BLOCKS, (14,))
    prefill.step_until(prefill.reports.sent, "p")


def test_fully_cached_prompt_requests_no_prefill(
    stack: ExitStack, tmp_path: Path, post: Post
) -> None:
    _, decode = start(stack, tmp_path)
    waiting = FakeRequest("d", PROMPT, waiting_params(post, "d"))
    decode.scheduler.on_new_request(waiting)
    assert decode.admit(waiting, D_BLOCKS, num_computed=13) == 0
    expect(decode, post, "d2")
    assert post.wait()["remote_request_id"] == "d2"
    assert len(post.server.posts) == 1
    assert not decode.reports.received
