"""P pushes a prompt's KV into D's blocks while it computes, through the connector's two sides
without vLLM.

D reserves blocks and posts them to a metaserver, which sends P the request, as the proxy does.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.metaserver import Post
from support.vllm_caches import filled_ranks, whole_prompt
from support.vllm_instance import FakeRequest, FakeVllm, running

from mooncake_hal.kv.geometry import AttentionKind
from mooncake_kv.config import KVTransferConfig
from mooncake_vllm.vllm_memory import LINEAR, ModelKV

MODEL = ModelKV(AttentionKind.GQA, 2, 4, (8, 8), "float32")
CONFIG = KVTransferConfig(
    connector="MooncakeLayerwiseConnector", transports=("tcp",), advertise_host="127.0.0.1"
)
PATIENT = replace(CONFIG, lease_s=600.0)
"""D would wait this long for a P that does not report."""
PROMPT = list(range(100, 114))
P_BLOCKS, D_BLOCKS = [5, 1, 4, 2], [3, 0, 6, 1]


def start(
    stack: ExitStack,
    folder: Path,
    tps: tuple[int, int] = (1, 1),
    format: str = LINEAR,
    config: KVTransferConfig = CONFIG,
) -> tuple[FakeVllm, FakeVllm]:
    first, second = (
        filled_ranks(MODEL, "LBHNC", tp_size, seed=seed, format=format)
        for seed, tp_size in enumerate(tps, start=1)
    )
    return (
        stack.enter_context(running("p", folder, first, config)),
        stack.enter_context(running("d", folder, second, config)),
    )


def expect(decode: FakeVllm, post: Post, name: str = "d", num_computed: int = 0) -> FakeRequest:
    """Have D receive a request and reserve blocks for it."""
    request = FakeRequest(
        name, PROMPT, {"do_remote_prefill": True, "metaserver": post.server.url(name)}
    )
    decode.scheduler.on_new_request(request)
    assert decode.admit(request, D_BLOCKS, num_computed) == len(PROMPT) - num_computed
    decode.step()
    return request


@pytest.mark.parametrize("names_layers", [True, False])
@pytest.mark.parametrize("format", [LINEAR, "vllm-cpu/vec/4"])
@pytest.mark.parametrize("tps", [(1, 1), (2, 1), (1, 2)])
def test_prompt_is_pushed_chunk_by_chunk(
    stack: ExitStack,
    tmp_path: Path,
    post: Post,
    tps: tuple[int, int],
    format: str,
    names_layers: bool,
) -> None:
    prefill, decode = start(stack, tmp_path, tps, format)
    expect(decode, post)
    request = FakeRequest("p", PROMPT, post.wait())
    prefill.scheduler.on_new_request(request)
    kept = prefill.compute(request, P_BLOCKS, (3, 9, 14), names_layers=names_layers)
    assert kept == (True, None)
    decode.step_until(decode.reports.received, "d")
    prefill.step_until(prefill.reports.sent, "p")
    assert not decode.reports.failed
    found, wanted = whole_prompt(decode.caches, D_BLOCKS), whole_prompt(prefill.caches, P_BLOCKS)
    assert (found[:, :, : len(PROMPT)] == wanted[:, :, : len(PROMPT)]).all()


@pytest.mark.parametrize("format", [LINEAR, "vllm-cpu/vec/4"])
def test_prefix_cached_on_d_is_not_sent(
    stack: ExitStack, tmp_path: Path, post: Post, format: str
) -> None:
    prefill, decode = start(stack, tmp_path, format=format)
    before = whole_prompt(decode.caches, D_BLOCKS)
    expect(decode, post, num_computed=8)
    request = FakeRequest("p", PROMPT, post.wait())
    prefill.scheduler.on_new_request(request)
    prefill.compute(request, P_BLOCKS, (14,))
    decode.step_until(decode.reports.received, "d")
    assert not decode.reports.failed
    found, wanted = whole_prompt(decode.caches, D_BLOCKS), whole_prompt(prefill.caches, P_BLOCKS)
    assert (found[:, :, :8] == before[:, :, :8]).all()
    assert (found[:, :, 8:14] == wanted[:, :, 8:14]).all()


def test_choices_of_one_request_reserve_once(stack: ExitStack, tmp_path: Path, post: Post) -> None:
    prefill, decode = start(stack, tmp_path)
    child = expect(decode, post)
    sibling = replace(child, request_id="d2")
    decode.scheduler.on_new_request(sibling)
    assert decode.admit(sibling, D_BLOCKS) is None
    request = FakeRequest("p", PROMPT, post.wait())
    prefill.scheduler.on_new_request(request)
    prefill.compute(request, P_BLOCKS, (14,))
    decode.step_until(decode.reports.received, "d")
    assert [decode.admit(each, D_BLOCKS) for each in (child, sibling)] == [0, 0]
    assert len(post.server.posts) == 1


def test_fully_cached_prompt_requests_no_prefill(
    stack: ExitStack, tmp_path: Path, post: Post
) -> None:
    _, decode = start(stack, tmp_path)
    params = {"do_remote_prefill": True, "metaserver": post.server.url("d")}
    waiting = FakeRequest("d", PROMPT, params)
    decode.scheduler.on_new_request(waiting)
    assert decode.admit(waiting, D_BLOCKS, num_computed=13) == 0
    expect(decode, post, "d2")
    assert post.wait()["remote_request_id"] == "d2"
    assert len(post.server.posts) == 1
    assert not decode.reports.received


@pytest.mark.parametrize("when", ["before it runs", "when it has run", "when it is preempted"])
def test_aborted_prefill_fails_the_load(
    stack: ExitStack, tmp_path: Path, post: Post, when: str
) -> None:
    """Only blocks that it has run with are held."""
    prefill, decode = start(stack, tmp_path)
    expect(decode, post)
    request = FakeRequest("p", PROMPT, post.wait())
    prefill.scheduler.on_new_request(request)
    if when != "before it runs":
        prefill.run(request, P_BLOCKS, (3,))
    request.num_preemptions += when == "when it is preempted"
    request.status.name = "FINISHED_ABORTED"
    is_held = when == "when it has run"
    assert prefill.finish(request, P_BLOCKS[:1]) == (is_held, None)
    decode.step_until(decode.reports.received, "d")
    if is_held:
        prefill.step_until(prefill.reports.sent, "p")
    assert decode.reports.failed == {"d"}


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
    request = FakeRequest("p", PROMPT, post.wait())
    request = replace(request, **changes)
    prefill.scheduler.on_new_request(request)
    decode.step_until(decode.reports.received, "d")
    assert decode.reports.failed == {"d"}
    assert prefill.scheduler.num_refused == 1
    assert prefill.finish(request, P_BLOCKS) == (False, None)
    prefill.step()
    assert not prefill.reports.sent


def test_request_of_another_mode_leaves_pushes_to_its_peer_alone(
    stack: ExitStack, tmp_path: Path, post: Post, caplog: pytest.LogCaptureFixture
) -> None:
    """D rejects the notice about such a request, since it has not reserved blocks for a pull."""
    prefill, decode = start(stack, tmp_path)
    expect(decode, post)
    params = post.wait()
    request = FakeRequest("p", PROMPT, params)
    prefill.scheduler.on_new_request(request)
    prefill.scheduler.on_new_request(FakeRequest("other", PROMPT, params | {"do_pull": True}))
    deadline = time.monotonic() + 20.0
    while "the peer of other could not be notified" not in caplog.text:
        assert time.monotonic() < deadline
        prefill.step()
        time.sleep(0.005)
    prefill.compute(request, P_BLOCKS, (3, 9, 14))
    decode.step_until(decode.reports.received, "d")
    assert not decode.reports.failed


def test_aborted_decode_frees_both_sides(stack: ExitStack, tmp_path: Path, post: Post) -> None:
    prefill, decode = start(stack, tmp_path)
    waiting = expect(decode, post)
    request = FakeRequest("p", PROMPT, post.wait())
    assert decode.scheduler.request_finished(waiting, [D_BLOCKS]) == (False, None)
    decode.step_until(decode.reports.received, "d")
    prefill.scheduler.on_new_request(request)
    prefill.compute(request, P_BLOCKS, (14,))
    prefill.step_until(prefill.reports.sent, "p")


def test_pull_params_are_rejected_naming_the_connector(
    stack: ExitStack, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    prefill, _ = start(stack, tmp_path)
    request = replace(FakeRequest("p", PROMPT), kv_transfer_params={"do_remote_decode": True})
    prefill.scheduler.on_new_request(request)
    assert prefill.compute(request, P_BLOCKS, (14,)) == (False, None)
    assert "wants KV transfer by pull, this instance's connector does push" in caplog.text
