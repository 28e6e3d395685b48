"""A prompt goes from one instance's memory into another's by the connector's two sides, without
vLLM: over real sockets and transports, whatever the layouts, and however requests end."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.vllm_caches import filled_ranks, whole_prompt
from support.vllm_instance import HOST, NO_TOKENS, Asked, FakeVllm, running

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
def test_a_prompt_arrives_and_each_side_is_told_once(
    stack: ExitStack, tmp_path: Path, transport: str, tps: tuple[int, int]
) -> None:
    config = replace(CONFIG, transports=(transport,))
    prefill, decode = start(stack, tmp_path, tps, ("LBNHC", "BHLNC"), config)
    params = prefill.prefill(Asked("one", PROMPT, SEND), P_BLOCKS)
    request = Asked("two", PROMPT, params)
    decode.scheduler.on_new_request(request)
    assert decode.admit(request, D_BLOCKS) == len(PROMPT)
    decode.step_until(decode.told.received, "two")
    prefill.step_until(prefill.told.sent, "one")
    assert not decode.told.failed
    found, wanted = whole_prompt(decode.caches, D_BLOCKS), whole_prompt(prefill.caches, P_BLOCKS)
    assert (found[:, :, : len(PROMPT)] == wanted[:, :, : len(PROMPT)]).all()
    assert decode.scheduler.num_to_load(request, 0) == 0  # after a preemption
    assert decode.scheduler.request_finished(request, [D_BLOCKS]) == (False, None)


@pytest.mark.parametrize("num_cached", [0, 8])
def test_the_proxy_is_told_how_much_of_a_prompt_was_cached(
    stack: ExitStack, tmp_path: Path, num_cached: int
) -> None:
    instance = stack.enter_context(running("p", tmp_path, filled_ranks(MODEL, "LBHNC", 1), CONFIG))
    request = Asked("p", PROMPT, SEND)
    instance.scheduler.on_new_request(request)
    chunks = [num_cached + 4, len(PROMPT)]
    _, params = instance.compute(request, P_BLOCKS, chunks, num_cached=num_cached)
    assert params is not None
    assert params["remote_cached_tokens"] == num_cached


@pytest.mark.parametrize("room", [1, 2])
def test_d_is_asked_to_go_on_only_where_there_is_room_behind_ps_token(
    stack: ExitStack, tmp_path: Path, room: int
) -> None:
    caches = filled_ranks(MODEL, "LBHNC", 1)
    instance = running("p", tmp_path, caches, CONFIG, max_model_len=len(PROMPT) + room)
    params = stack.enter_context(instance).prefill(Asked("p", PROMPT, SEND), P_BLOCKS)
    assert params["decode_continues_prompt"] == (room > 1)


def test_what_a_prompt_finds_of_itself_after_a_preemption_was_not_cached(
    stack: ExitStack, tmp_path: Path
) -> None:
    instance = stack.enter_context(running("p", tmp_path, filled_ranks(MODEL, "LBHNC", 1), CONFIG))
    request = Asked("p", PROMPT, SEND)
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


def test_nothing_moves_before_the_step_that_allocated_the_blocks(
    stack: ExitStack, tmp_path: Path
) -> None:
    prefill, decode = start(stack, tmp_path)
    for number in range(3):  # the first one shakes hands; then orders come before the steps do
        params = prefill.prefill(Asked(f"p{number}", PROMPT, SEND), P_BLOCKS)
        request = Asked(f"d{number}", PROMPT, params)
        decode.scheduler.on_new_request(request)
        decode.admit(request, D_BLOCKS)
        prefill.step()
        assert not decode.told.received.get(f"d{number}")
        decode.step_until(decode.told.received, f"d{number}")
        prefill.step_until(prefill.told.sent, f"p{number}")


def test_nothing_moves_before_the_device_has_done_what_steps_enqueued_before(
    stack: ExitStack, tmp_path: Path
) -> None:
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
    request = Asked("d", PROMPT, prefill.prefill(Asked("p", PROMPT, SEND), P_BLOCKS))
    decode.scheduler.on_new_request(request)
    before = whole_prompt(decode.caches, D_BLOCKS).copy()
    decode.admit(request, D_BLOCKS)
    decode.step()
    assert awaited.wait(LONG_S)
    assert (whole_prompt(decode.caches, D_BLOCKS) == before).all()
    ends.set()
    decode.step_until(decode.told.received, "d")
    found, wanted = whole_prompt(decode.caches, D_BLOCKS), whole_prompt(prefill.caches, P_BLOCKS)
    assert (found[:, :, : len(PROMPT)] == wanted[:, :, : len(PROMPT)]).all()
    prefill.step_until(prefill.told.sent, "p")


def test_both_wait_until_there_is_something_to_tell(stack: ExitStack, tmp_path: Path) -> None:
    prefill, decode = start(stack, tmp_path)
    assert not prefill.scheduler.is_waiting
    params = prefill.prefill(Asked("p", PROMPT, SEND), P_BLOCKS)
    assert prefill.scheduler.is_waiting  # its blocks are held
    request = Asked("d", PROMPT, params)
    decode.scheduler.on_new_request(request)
    assert not decode.scheduler.is_waiting
    decode.admit(request, D_BLOCKS)
    assert decode.scheduler.is_waiting
    decode.step_until(decode.told.received, "d")
    prefill.step_until(prefill.told.sent, "p")
    assert not decode.scheduler.is_waiting
    assert not prefill.scheduler.is_waiting


def test_a_new_request_does_not_wait_for_the_end_of_a_lease(
    stack: ExitStack, tmp_path: Path
) -> None:
    instance = stack.enter_context(running("p", tmp_path, filled_ranks(MODEL, "LBHNC", 1), CONFIG))
    instance.prefill(Asked("held", PROMPT, SEND), P_BLOCKS)
    [worker], taken = instance.workers, []
    worker.begin_step((), ["held"], wait_s=LONG_S)
    step = threading.Thread(target=lambda: taken.append(worker.take_results()))
    step.start()
    instance.scheduler.on_new_request(Asked("new", PROMPT))
    step.join(LONG_S / 2)
    assert [(each.sent, each.received) for each in taken] == [(set(), set())]


def test_a_prefix_that_is_here_is_not_loaded_and_a_whole_one_frees_the_peer(
    stack: ExitStack, tmp_path: Path
) -> None:
    prefill, decode = start(stack, tmp_path)
    params = prefill.prefill(Asked("p", PROMPT, SEND), P_BLOCKS)
    request = Asked("d", PROMPT, params)
    decode.scheduler.on_new_request(request)
    before = whole_prompt(decode.caches, D_BLOCKS)
    assert decode.admit(request, D_BLOCKS, num_computed=8) == 6
    decode.step_until(decode.told.received, "d")
    assert (whole_prompt(decode.caches, D_BLOCKS)[:, :, :8] == before[:, :, :8]).all()

    params = prefill.prefill(Asked("p2", PROMPT, SEND), P_BLOCKS)
    request = Asked("d2", PROMPT, params)
    decode.scheduler.on_new_request(request)
    assert decode.admit(request, D_BLOCKS, num_computed=13) == 0
    prefill.step_until(prefill.told.sent, "p2")
    decode.step()
    assert "d2" not in decode.told.received


@pytest.mark.parametrize("num_computed", [0, 8, 13])
def test_the_peers_token_may_stand_behind_the_prompt(
    stack: ExitStack, tmp_path: Path, num_computed: int
) -> None:
    prefill, decode = start(stack, tmp_path)
    params = prefill.prefill(Asked("p", PROMPT, SEND), P_BLOCKS)
    request = Asked("d", [*PROMPT, 7], params | {"first_token_delivered": True})
    decode.scheduler.on_new_request(request)
    assert decode.admit(request, D_BLOCKS, num_computed) == len(PROMPT) - num_computed
    decode.step_until(decode.told.received, "d")
    prefill.step_until(prefill.told.sent, "p")
    assert not decode.told.failed
    wanted = slice(num_computed, len(PROMPT))
    found = whole_prompt(decode.caches, D_BLOCKS)[:, :, wanted]
    assert (found == whole_prompt(prefill.caches, P_BLOCKS)[:, :, wanted]).all()


def test_another_token_behind_the_prompt_is_another_prompt(
    stack: ExitStack, tmp_path: Path
) -> None:
    prefill, decode = start(stack, tmp_path)
    params = prefill.prefill(Asked("p", PROMPT, SEND), P_BLOCKS)
    request = Asked("d", [*PROMPT, 8], params | {"first_token_delivered": True})
    decode.scheduler.on_new_request(request)
    assert decode.admit(request, D_BLOCKS) == 0
    prefill.step_until(prefill.told.sent, "p")


def test_children_of_one_request_load_once(stack: ExitStack, tmp_path: Path) -> None:
    prefill, decode = start(stack, tmp_path)
    params = prefill.prefill(Asked("p", PROMPT, SEND), P_BLOCKS)
    children = [Asked(f"{number}_d", PROMPT, params) for number in range(3)]
    for child in children:
        decode.scheduler.on_new_request(child)
    assert [decode.admit(child, D_BLOCKS) for child in children] == [len(PROMPT), None, None]
    decode.step_until(decode.told.received, "0_d")
    assert decode.admit(children[1], D_BLOCKS) is None  # vLLM has not run the first one yet
    assert [decode.admit(child, D_BLOCKS) for child in children] == [0, 0, 0]
    assert list(decode.told.received) == ["0_d"]
    assert not decode.told.failed


def test_a_second_reader_fails_and_is_told_once(stack: ExitStack, tmp_path: Path) -> None:
    prefill, decode = start(stack, tmp_path)
    params = prefill.prefill(Asked("p", PROMPT, SEND), P_BLOCKS)
    for name in ("d", "again"):
        request = Asked(name, PROMPT, params)
        decode.scheduler.on_new_request(request)
        decode.admit(request, D_BLOCKS)
        decode.step_until(decode.told.received, name)
        decode.scheduler.request_finished(request, [D_BLOCKS])
    assert decode.told.failed == {"again"}


@pytest.mark.parametrize("is_loading", [False, True])
def test_a_request_that_ends_early_frees_the_peer(
    stack: ExitStack, tmp_path: Path, is_loading: bool
) -> None:
    prefill, decode = start(stack, tmp_path)
    params = prefill.prefill(Asked("p", PROMPT, SEND), P_BLOCKS)
    request = Asked("d", PROMPT, params)
    decode.scheduler.on_new_request(request)
    if is_loading:
        decode.admit(request, D_BLOCKS)
    assert decode.scheduler.request_finished(request, [D_BLOCKS]) == (False, None)
    if is_loading:  # vLLM keeps the blocks until it is told; a load begins with the step after it
        decode.step_until(decode.told.received, "d")
    prefill.step_until(prefill.told.sent, "p")


@pytest.mark.parametrize(
    "change",
    [
        {"abort_immediately": True, "prompt_token_ids": [0]},
        {"prompt_token_ids": [*PROMPT[:-1], 1]},
        {"lora_request": object()},
        {"mm_features": [object()]},
    ],
)
def test_one_that_is_refused_runs_alone_and_frees_the_peer(
    stack: ExitStack, tmp_path: Path, change: dict[str, Any]
) -> None:
    prefill, decode = start(stack, tmp_path)
    params = prefill.prefill(Asked("p", PROMPT, SEND), P_BLOCKS)
    request = replace(Asked("d", PROMPT, params), **change)
    decode.scheduler.on_new_request(request)
    assert decode.admit(request, D_BLOCKS) == 0
    assert decode.scheduler.request_finished(request, [D_BLOCKS]) == (False, None)
    prefill.step_until(prefill.told.sent, "p")


def test_parameters_that_name_nobody_hurt_nobody(stack: ExitStack, tmp_path: Path) -> None:
    _, decode = start(stack, tmp_path)
    for number, params in enumerate(
        ({"do_remote_prefill": True, "remote_port": "x"}, {"do_remote_prefill": True}, {"other": 1})
    ):
        request = Asked(f"d{number}", PROMPT, params)
        decode.scheduler.on_new_request(request)
        assert decode.admit(request, D_BLOCKS) == 0
    assert decode.scheduler.stats()["refused_requests"] == 2


@pytest.mark.parametrize(
    ("status", "num_computed"),
    [("FINISHED_ABORTED", 14), ("FINISHED_STOPPED", 14), ("FINISHED_LENGTH_CAPPED", 13)],
)
def test_a_prefill_that_leaves_nothing_to_continue_keeps_no_blocks(
    stack: ExitStack, tmp_path: Path, status: str, num_computed: int
) -> None:
    prefill, _ = start(stack, tmp_path)
    request = Asked("p", PROMPT, SEND, num_computed, [7])
    prefill.scheduler.on_new_request(request)
    request.status.name = status
    assert prefill.scheduler.request_finished(request, [P_BLOCKS]) == (False, None)


def test_a_lease_that_nobody_wants_ends(stack: ExitStack, tmp_path: Path) -> None:
    prefill, decode = start(stack, tmp_path, config=replace(CONFIG, lease_s=0.5))
    params = prefill.prefill(Asked("p", PROMPT, SEND), P_BLOCKS)
    prefill.step_until(prefill.told.sent, "p")
    request = Asked("d", PROMPT, params)
    decode.scheduler.on_new_request(request)
    if decode.admit(request, D_BLOCKS):
        decode.step_until(decode.told.received, "d")
        assert decode.told.failed == {"d"}


def test_a_prefill_instance_that_is_gone_fails_the_load_once(
    stack: ExitStack, tmp_path: Path
) -> None:
    prefill, decode = start(stack, tmp_path)
    params = prefill.prefill(Asked("p", PROMPT, SEND), P_BLOCKS)
    prefill.scheduler.close()
    for worker in prefill.workers:
        worker.close()
    request = Asked("d", PROMPT, params)
    decode.scheduler.on_new_request(request)
    decode.admit(request, D_BLOCKS)
    decode.step_until(decode.told.received, "d")
    assert decode.told.failed == {"d"}


def test_a_worker_whose_thread_died_ends_the_engine(stack: ExitStack, tmp_path: Path) -> None:
    _, decode = start(stack, tmp_path)
    decode.workers[0].report_death(RuntimeError("a defect"))
    with pytest.raises(ConnectorDied, match="rank 0: RuntimeError"):
        decode.step_until(decode.told.received, "nobody")


def test_pages_of_another_packing_are_refused_by_name(
    stack: ExitStack, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    formats = ("vllm-cpu/amx/4", "vllm-cpu/vec/4")
    prefill, decode = start(stack, tmp_path, formats=formats)
    params = prefill.prefill(Asked("p", PROMPT, SEND), P_BLOCKS)
    request = Asked("d", PROMPT, params)
    decode.scheduler.on_new_request(request)
    decode.admit(request, D_BLOCKS)
    decode.step_until(decode.told.received, "d")
    assert decode.told.failed == {"d"}
    assert all(name in caplog.text for name in (*formats, "the format of KV blocks differs"))


def test_ranks_that_differ_are_no_instance(tmp_path: Path) -> None:
    ranks = [
        filled_ranks(MODEL, "LBHNC", 2)[0],
        filled_ranks(MODEL, "LBHNC", 2, format="vllm-cpu/vec/4")[1],
    ]
    with (
        pytest.raises(KVConfigError, match="the ranks of this instance differ"),
        running("p", tmp_path, ranks, CONFIG),
    ):
        pass
