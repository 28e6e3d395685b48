"""A prompt is transferred between two instances by the connector's two sides, without vLLM.

Over real sockets and transports, in all layouts, and with every way for a request to end.
"""

from __future__ import annotations

import threading
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.kv_rank import wait_for
from support.vllm_caches import filled_ranks, whole_prompt
from support.vllm_instance import HOST, NO_TOKENS, FakeRequest, FakeVllm, running

from mooncake_hal.kv.geometry import AttentionKind
from mooncake_kv.config import KVTransferConfig
from mooncake_kv.errors import KVConfigError
from mooncake_vllm.errors import ConnectorDied
from mooncake_vllm.vllm_memory import LINEAR, ModelKV

MODEL = ModelKV(AttentionKind.GQA, 2, 4, (8, 8), "float32")
CONFIG = KVTransferConfig(transports=("tcp",), advertise_host="127.0.0.1")
PROMPT = list(range(100, 114))
P_BLOCKS, D_BLOCKS = [5, 1, 4, 2], [3, 0, 6, 1]
SEND = {"do_remote_decode": True}
LONG_S = 30.0


Pair = tuple[FakeVllm, FakeVllm]


def start(
    stack: ExitStack,
    folder: Path,
    tps: tuple[int, int] = (1, 1),
    orders: tuple[str, str] = ("LBHNC", "LBHNC"),
    config: KVTransferConfig = CONFIG,
    formats: tuple[str, str] = (LINEAR, LINEAR),
) -> Pair:
    first = filled_ranks(MODEL, orders[0], tps[0], seed=1, format=formats[0])
    second = filled_ranks(MODEL, orders[1], tps[1], seed=2, format=formats[1])
    return (
        stack.enter_context(running("p", folder, first, config)),
        stack.enter_context(running("d", folder, second, config)),
    )


@pytest.mark.parametrize("transport", ["tcp", "shm"])
@pytest.mark.parametrize("tps", [(1, 1), (2, 1), (1, 2)])
def test_prompt_arrives_and_each_side_is_notified_once(
    stack: ExitStack, tmp_path: Path, transport: str, tps: tuple[int, int]
) -> None:
    config = replace(CONFIG, transports=(transport,))
    prefill, decode = start(stack, tmp_path, tps, ("LBNHC", "BHLNC"), config)
    params = prefill.prefill(FakeRequest("one", PROMPT, SEND), P_BLOCKS)
    request = FakeRequest("two", PROMPT, params)
    decode.scheduler.on_new_request(request)
    assert decode.admit(request, D_BLOCKS) == len(PROMPT)
    decode.step_until(decode.reports.received, "two")
    prefill.step_until(prefill.reports.sent, "one")
    assert not decode.reports.failed
    found, wanted = whole_prompt(decode.caches, D_BLOCKS), whole_prompt(prefill.caches, P_BLOCKS)
    assert (found[:, :, : len(PROMPT)] == wanted[:, :, : len(PROMPT)]).all()
    assert decode.scheduler.get_num_new_matched_tokens(request, 0) == 0  # after a preemption
    assert decode.scheduler.request_finished(request, [D_BLOCKS]) == (False, None)


def test_request_that_must_compute_its_whole_prompt_loads_nothing(
    stack: ExitStack, tmp_path: Path
) -> None:
    prefill, decode = start(stack, tmp_path)
    params = prefill.prefill(FakeRequest("one", PROMPT, SEND), P_BLOCKS)
    request = FakeRequest("two", PROMPT, params, skip_reading_prefix_cache=True)
    decode.scheduler.on_new_request(request)
    assert decode.admit(request, D_BLOCKS) == 0
    prefill.step_until(prefill.reports.sent, "one")  # long before its lease expires
    assert decode.scheduler.request_finished(request, [D_BLOCKS]) == (False, None)
    assert not decode.reports.received


@pytest.mark.parametrize("num_cached", [0, 8])
def test_proxy_receives_number_of_cached_tokens(
    stack: ExitStack, tmp_path: Path, num_cached: int
) -> None:
    instance = stack.enter_context(running("p", tmp_path, filled_ranks(MODEL, "LBHNC", 1), CONFIG))
    request = FakeRequest("p", PROMPT, SEND)
    instance.scheduler.on_new_request(request)
    chunks = [num_cached + 4, len(PROMPT)]
    _, params = instance.compute(request, P_BLOCKS, chunks, num_cached=num_cached)
    assert params is not None
    assert params["remote_cached_tokens"] == num_cached


@pytest.mark.parametrize("room", [1, 2])
def test_d_continues_only_if_context_length_allows(
    stack: ExitStack, tmp_path: Path, room: int
) -> None:
    caches = filled_ranks(MODEL, "LBHNC", 1)
    instance = running("p", tmp_path, caches, CONFIG, max_model_len=len(PROMPT) + room)
    params = stack.enter_context(instance).prefill(FakeRequest("p", PROMPT, SEND), P_BLOCKS)
    assert params["decode_continues_prompt"] == (room > 1)


def test_own_blocks_found_after_preemption_do_not_count_as_cached(
    stack: ExitStack, tmp_path: Path
) -> None:
    instance = stack.enter_context(running("p", tmp_path, filled_ranks(MODEL, "LBHNC", 1), CONFIG))
    request = FakeRequest("p", PROMPT, SEND)
    instance.scheduler.on_new_request(request)
    for num_computed in (4, 12):
        new = SimpleNamespace(req_id="p", block_ids=(P_BLOCKS,), num_computed_tokens=num_computed)
        step = {**vars(NO_TOKENS), "scheduled_new_reqs": [new], "num_scheduled_tokens": {"p": 2}}
        instance.step(SimpleNamespace(**step))
    request.num_computed_tokens, request.output_token_ids = len(PROMPT), [7]
    request.status = SimpleNamespace(name="FINISHED_LENGTH_CAPPED")
    _, params = instance.scheduler.request_finished(request, [P_BLOCKS])
    assert params is not None
    assert params["remote_cached_tokens"] == 4


def test_no_transfer_before_step_that_allocated_blocks(stack: ExitStack, tmp_path: Path) -> None:
    prefill, decode = start(stack, tmp_path)
    # the first request includes the handshake; later orders arrive before their steps
    for number in range(3):
        params = prefill.prefill(FakeRequest(f"p{number}", PROMPT, SEND), P_BLOCKS)
        request = FakeRequest(f"d{number}", PROMPT, params)
        decode.scheduler.on_new_request(request)
        decode.admit(request, D_BLOCKS)
        prefill.step()
        assert not decode.reports.received.get(f"d{number}")
        decode.step_until(decode.reports.received, f"d{number}")
        prefill.step_until(prefill.reports.sent, f"p{number}")


def test_no_transfer_before_earlier_device_work_completes(stack: ExitStack, tmp_path: Path) -> None:
    awaited, ends = threading.Event(), threading.Event()

    def synchronize() -> None:
        awaited.set()
        assert ends.wait(LONG_S)

    event = SimpleNamespace(record=int, query=ends.is_set, synchronize=synchronize)
    device = replace(HOST, make_event=lambda: event)
    caches = [filled_ranks(MODEL, "LBHNC", 1, seed=seed) for seed in (1, 2)]
    prefill = stack.enter_context(running("p", tmp_path, caches[0], CONFIG))
    decode = stack.enter_context(running("d", tmp_path, caches[1], CONFIG, device=device))
    stack.callback(ends.set)
    request = FakeRequest("d", PROMPT, prefill.prefill(FakeRequest("p", PROMPT, SEND), P_BLOCKS))
    decode.scheduler.on_new_request(request)
    before = whole_prompt(decode.caches, D_BLOCKS).copy()
    decode.admit(request, D_BLOCKS)
    decode.step()
    assert awaited.wait(LONG_S)
    assert (whole_prompt(decode.caches, D_BLOCKS) == before).all()
    ends.set()
    decode.step_until(decode.reports.received, "d")
    found, wanted = whole_prompt(decode.caches, D_BLOCKS), whole_prompt(prefill.caches, P_BLOCKS)
    assert (found[:, :, : len(PROMPT)] == wanted[:, :, : len(PROMPT)]).all()
    prefill.step_until(prefill.reports.sent, "p")


def test_both_sides_block_until_a_notification(stack: ExitStack, tmp_path: Path) -> None:
    prefill, decode = start(stack, tmp_path)
    assert not prefill.scheduler.is_waiting
    params = prefill.prefill(FakeRequest("p", PROMPT, SEND), P_BLOCKS)
    assert prefill.scheduler.is_waiting  # its blocks are leased
    request = FakeRequest("d", PROMPT, params)
    decode.scheduler.on_new_request(request)
    assert not decode.scheduler.is_waiting
    decode.admit(request, D_BLOCKS)
    assert decode.scheduler.is_waiting
    decode.step_until(decode.reports.received, "d")
    prefill.step_until(prefill.reports.sent, "p")
    assert not decode.scheduler.is_waiting
    assert not prefill.scheduler.is_waiting


def test_new_request_does_not_wait_for_lease_to_end(stack: ExitStack, tmp_path: Path) -> None:
    instance = stack.enter_context(running("p", tmp_path, filled_ranks(MODEL, "LBHNC", 1), CONFIG))
    instance.prefill(FakeRequest("held", PROMPT, SEND), P_BLOCKS)
    [worker], taken = instance.workers, []
    worker.begin_step((), ["held"], wait_s=LONG_S)
    step = threading.Thread(target=lambda: taken.append(worker.take_results()))
    step.start()
    instance.scheduler.on_new_request(FakeRequest("new", PROMPT))
    step.join(LONG_S / 2)
    assert [(each.finished_sending, each.finished_recving) for each in taken] == [(set(), set())]


def test_cached_prefix_is_not_loaded_and_full_hit_frees_peer(
    stack: ExitStack, tmp_path: Path
) -> None:
    prefill, decode = start(stack, tmp_path)
    params = prefill.prefill(FakeRequest("p", PROMPT, SEND), P_BLOCKS)
    request = FakeRequest("d", PROMPT, params)
    decode.scheduler.on_new_request(request)
    before = whole_prompt(decode.caches, D_BLOCKS)
    assert decode.admit(request, D_BLOCKS, num_computed=8) == 6
    decode.step_until(decode.reports.received, "d")
    assert (whole_prompt(decode.caches, D_BLOCKS)[:, :, :8] == before[:, :, :8]).all()

    params = prefill.prefill(FakeRequest("p2", PROMPT, SEND), P_BLOCKS)
    request = FakeRequest("d2", PROMPT, params)
    decode.scheduler.on_new_request(request)
    assert decode.admit(request, D_BLOCKS, num_computed=13) == 0
    prefill.step_until(prefill.reports.sent, "p2")
    decode.step()
    assert "d2" not in decode.reports.received


@pytest.mark.parametrize("num_computed", [0, 8, 13])
def test_prompt_may_end_with_peers_token(
    stack: ExitStack, tmp_path: Path, num_computed: int
) -> None:
    prefill, decode = start(stack, tmp_path)
    params = prefill.prefill(FakeRequest("p", PROMPT, SEND), P_BLOCKS)
    request = FakeRequest("d", [*PROMPT, 7], params | {"first_token_delivered": True})
    decode.scheduler.on_new_request(request)
    assert decode.admit(request, D_BLOCKS, num_computed) == len(PROMPT) - num_computed
    decode.step_until(decode.reports.received, "d")
    prefill.step_until(prefill.reports.sent, "p")
    assert not decode.reports.failed
    wanted = slice(num_computed, len(PROMPT))
    found = whole_prompt(decode.caches, D_BLOCKS)[:, :, wanted]
    assert (found == whole_prompt(prefill.caches, P_BLOCKS)[:, :, wanted]).all()


def test_prompt_ending_with_other_token_is_rejected(stack: ExitStack, tmp_path: Path) -> None:
    prefill, decode = start(stack, tmp_path)
    params = prefill.prefill(FakeRequest("p", PROMPT, SEND), P_BLOCKS)
    request = FakeRequest("d", [*PROMPT, 8], params | {"first_token_delivered": True})
    decode.scheduler.on_new_request(request)
    assert decode.admit(request, D_BLOCKS) == 0
    prefill.step_until(prefill.reports.sent, "p")


def test_choices_of_one_request_load_once(stack: ExitStack, tmp_path: Path) -> None:
    prefill, decode = start(stack, tmp_path)
    params = prefill.prefill(FakeRequest("p", PROMPT, SEND), P_BLOCKS)
    children = [FakeRequest(f"{number}_d", PROMPT, params) for number in range(3)]
    for child in children:
        decode.scheduler.on_new_request(child)
    assert [decode.admit(child, D_BLOCKS) for child in children] == [len(PROMPT), None, None]
    decode.step_until(decode.reports.received, "0_d")
    assert decode.admit(children[1], D_BLOCKS) is None  # vLLM has not run the first choice yet
    assert [decode.admit(child, D_BLOCKS) for child in children] == [0, 0, 0]
    assert list(decode.reports.received) == ["0_d"]
    assert not decode.reports.failed


def test_choice_on_another_rank_than_the_first_leaves_the_lease_to_it(
    stack: ExitStack, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    prefill, first_rank = start(stack, tmp_path)
    caches = filled_ranks(MODEL, "LBHNC", 1, seed=3)
    other_rank = stack.enter_context(running("d2", tmp_path, caches, CONFIG))
    params = prefill.prefill(FakeRequest("p", PROMPT, SEND), P_BLOCKS)
    for number in (1, 12):
        child = FakeRequest(f"{number}_d", PROMPT, params)
        other_rank.scheduler.on_new_request(child)
        assert other_rank.admit(child, D_BLOCKS) == 0
        assert other_rank.scheduler.request_finished(child, [D_BLOCKS]) == (False, None)
    assert caplog.text.count("is on another data-parallel rank") == 1
    first = FakeRequest("0_d", PROMPT, params)
    first_rank.scheduler.on_new_request(first)
    assert first_rank.admit(first, D_BLOCKS) == len(PROMPT)
    first_rank.step_until(first_rank.reports.received, "0_d")
    assert not first_rank.reports.failed
    prefill.step_until(prefill.reports.sent, "p")


def test_second_reader_fails_and_is_notified_once(stack: ExitStack, tmp_path: Path) -> None:
    prefill, decode = start(stack, tmp_path)
    params = prefill.prefill(FakeRequest("p", PROMPT, SEND), P_BLOCKS)
    for name in ("d", "again"):
        request = FakeRequest(name, PROMPT, params)
        decode.scheduler.on_new_request(request)
        decode.admit(request, D_BLOCKS)
        decode.step_until(decode.reports.received, name)
        decode.scheduler.request_finished(request, [D_BLOCKS])
    assert decode.reports.failed == {"again"}


@pytest.mark.parametrize("is_loading", [False, True])
def test_aborted_request_frees_peer(stack: ExitStack, tmp_path: Path, is_loading: bool) -> None:
    prefill, decode = start(stack, tmp_path)
    params = prefill.prefill(FakeRequest("p", PROMPT, SEND), P_BLOCKS)
    request = FakeRequest("d", PROMPT, params)
    decode.scheduler.on_new_request(request)
    if is_loading:
        decode.admit(request, D_BLOCKS)
    assert decode.scheduler.request_finished(request, [D_BLOCKS]) == (False, None)
    if is_loading:  # vLLM keeps the blocks until notified; a load starts with the step after it
        decode.step_until(decode.reports.received, "d")
    prefill.step_until(prefill.reports.sent, "p")


@pytest.mark.parametrize(
    "change",
    [
        {"abort_immediately": True, "prompt_token_ids": [0]},
        {"prompt_token_ids": [*PROMPT[:-1], 1]},
        {"lora_request": object()},
        {"mm_features": [object()]},
    ],
)
def test_rejected_transfer_prefills_locally_and_frees_peer(
    stack: ExitStack, tmp_path: Path, change: dict[str, Any]
) -> None:
    prefill, decode = start(stack, tmp_path)
    params = prefill.prefill(FakeRequest("p", PROMPT, SEND), P_BLOCKS)
    request = replace(FakeRequest("d", PROMPT, params), **change)
    decode.scheduler.on_new_request(request)
    assert decode.admit(request, D_BLOCKS) == 0
    assert decode.scheduler.request_finished(request, [D_BLOCKS]) == (False, None)
    prefill.step_until(prefill.reports.sent, "p")


def test_params_without_a_peer_have_no_effect(stack: ExitStack, tmp_path: Path) -> None:
    _, decode = start(stack, tmp_path)
    for number, params in enumerate(
        ({"do_remote_prefill": True, "remote_port": "x"}, {"do_remote_prefill": True}, {"other": 1})
    ):
        request = FakeRequest(f"d{number}", PROMPT, params)
        decode.scheduler.on_new_request(request)
        assert decode.admit(request, D_BLOCKS) == 0
    assert decode.scheduler.stats()["refused_requests"] == 2


@pytest.mark.parametrize(
    ("status", "num_computed"),
    [("FINISHED_ABORTED", 14), ("FINISHED_STOPPED", 14), ("FINISHED_LENGTH_CAPPED", 13)],
)
def test_prefill_with_nothing_to_continue_keeps_no_blocks(
    stack: ExitStack, tmp_path: Path, status: str, num_computed: int
) -> None:
    prefill, _ = start(stack, tmp_path)
    request = FakeRequest("p", PROMPT, SEND, num_computed, [7])
    prefill.scheduler.on_new_request(request)
    request.status.name = status
    assert prefill.scheduler.request_finished(request, [P_BLOCKS]) == (False, None)


def test_unclaimed_lease_expires(stack: ExitStack, tmp_path: Path) -> None:
    prefill, decode = start(stack, tmp_path, config=replace(CONFIG, lease_s=0.5))
    params = prefill.prefill(FakeRequest("p", PROMPT, SEND), P_BLOCKS)
    prefill.step_until(prefill.reports.sent, "p")
    request = FakeRequest("d", PROMPT, params)
    decode.scheduler.on_new_request(request)
    if decode.admit(request, D_BLOCKS):
        decode.step_until(decode.reports.received, "d")
        assert decode.reports.failed == {"d"}


def test_lost_prefill_instance_fails_load_once(stack: ExitStack, tmp_path: Path) -> None:
    prefill, decode = start(stack, tmp_path)
    params = prefill.prefill(FakeRequest("p", PROMPT, SEND), P_BLOCKS)
    prefill.scheduler.close()
    for worker in prefill.workers:
        worker.close()
    request = FakeRequest("d", PROMPT, params)
    decode.scheduler.on_new_request(request)
    decode.admit(request, D_BLOCKS)
    decode.step_until(decode.reports.received, "d")
    assert decode.reports.failed == {"d"}


def test_dead_worker_thread_is_logged_and_ends_the_engine(
    stack: ExitStack, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """While vLLM is idle, it calls nothing that could end it."""
    _, decode = start(stack, tmp_path)
    decode.workers[0].report_death(RuntimeError("a defect"))
    wait_for(lambda: "the KV connector has died: " in caplog.text)
    assert "rank 0: RuntimeError('a defect')" in caplog.text
    with pytest.raises(ConnectorDied, match="rank 0: RuntimeError"):
        decode.step_until(decode.reports.received, "nobody")


def test_pages_of_other_packing_are_rejected_by_name(
    stack: ExitStack, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    formats = ("vllm-cpu/amx/4", "vllm-cpu/vec/4")
    prefill, decode = start(stack, tmp_path, formats=formats)
    params = prefill.prefill(FakeRequest("p", PROMPT, SEND), P_BLOCKS)
    request = FakeRequest("d", PROMPT, params)
    decode.scheduler.on_new_request(request)
    decode.admit(request, D_BLOCKS)
    decode.step_until(decode.reports.received, "d")
    assert decode.reports.failed == {"d"}
    assert all(name in caplog.text for name in (*formats, "the format of KV blocks differs"))


def test_ranks_with_different_metadata_are_rejected(tmp_path: Path) -> None:
    ranks = [
        filled_ranks(MODEL, "LBHNC", 2)[0],
        filled_ranks(MODEL, "LBHNC", 2, format="vllm-cpu/vec/4")[1],
    ]
    with (
        pytest.raises(KVConfigError, match="the ranks of this instance differ"),
        running("p", tmp_path, ranks, CONFIG),
    ):
        pass


@pytest.mark.parametrize("prompt", [PROMPT[:4], [*PROMPT[:-1], 1]], ids=["shorter", "other tokens"])
def test_request_that_names_the_kv_of_another_prompt_computes_its_own(
    stack: ExitStack, tmp_path: Path, prompt: list[int]
) -> None:
    """vLLM would end for all requests if more tokens were to be loaded than its prompt has. The
    other request still loads its KV."""
    prefill, decode = start(stack, tmp_path)
    params = prefill.prefill(FakeRequest("p", PROMPT, SEND), P_BLOCKS)
    request = FakeRequest("d", PROMPT, params)
    decode.scheduler.on_new_request(request)
    named = {"num_prompt_tokens": None, "prompt_digest": None}
    other = FakeRequest("other", prompt, params | named)
    decode.scheduler.on_new_request(other)
    assert decode.admit(other, [7]) == 0
    assert decode.scheduler.request_finished(other, [[7]]) == (False, None)
    assert decode.scheduler.stats()["refused_requests"] == 1
    assert decode.admit(request, D_BLOCKS) == len(PROMPT)
    decode.step_until(decode.reports.received, "d")
    prefill.step_until(prefill.reports.sent, "p")
    assert not decode.reports.failed


def test_params_of_a_request_without_token_ids_are_refused(
    stack: ExitStack, tmp_path: Path
) -> None:
    """Its prompt consists of embeddings, so it has no last token that a proxy may have appended."""
    _, decode = start(stack, tmp_path)
    params = {"do_remote_prefill": True, "first_token_delivered": True, "num_prompt_tokens": -1}
    request = replace(FakeRequest("d", [], params), prompt_token_ids=None, prompt_embeds=object())
    decode.scheduler.on_new_request(request)
    assert decode.admit(request, D_BLOCKS) == 0
    assert decode.scheduler.stats()["refused_requests"] == 1
