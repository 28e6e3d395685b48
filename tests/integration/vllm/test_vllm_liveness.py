"""A fatal error ends the engine, and a hung side keeps no blocks of its peers: the connector's two
sides without vLLM, over real sockets and transports."""

from __future__ import annotations

import time
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.vllm_caches import filled_ranks
from support.vllm_instance import FakeRequest, FakeVllm, running

from mooncake_hal.kv.geometry import AttentionKind
from mooncake_kv.config import KVTransferConfig
from mooncake_kv.ranks import Load, decode_to_rank
from mooncake_vllm.errors import ConnectorDied
from mooncake_vllm.vllm_memory import ModelKV

MODEL = ModelKV(AttentionKind.GQA, 2, 4, (8, 8), "float32")
CONFIG = KVTransferConfig(transports=("tcp",), advertise_host="127.0.0.1")
PROMPT = list(range(100, 114))
P_BLOCKS, D_BLOCKS = [5, 1, 4, 2], [3, 0, 6, 1]
SEND = {"do_remote_decode": True}


def start(
    stack: ExitStack,
    folder: Path,
    config: KVTransferConfig = CONFIG,
    step_timeout_s: float = 300.0,
) -> tuple[FakeVllm, FakeVllm]:
    """Start P and D."""
    prefill, decode = (
        stack.enter_context(
            running(
                name, folder, filled_ranks(MODEL, "LBHNC", 1, seed=seed), config, step_timeout_s
            )
        )
        for seed, name in enumerate("pd")
    )
    return prefill, decode


@pytest.mark.parametrize("where", ["step", "device", "link"])
def test_failed_order_ends_the_engine(
    stack: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Otherwise the request would wait for the load for ever. The order fails in the step's thread,
    if that sends it, in the thread that waits for the device, or in the link's."""
    prefill, decode = start(stack, tmp_path)
    params = prefill.prefill(FakeRequest("p", PROMPT, SEND), P_BLOCKS)
    request = FakeRequest("d", PROMPT, params)
    [worker], scheduler = decode.workers, decode.scheduler

    def receive(order: bytes) -> None:
        is_load = isinstance(decode_to_rank(order), Load)
        if is_load:
            raise RuntimeError("can't start new thread")
        obey(order)

    obey = worker._worker.receive
    monkeypatch.setattr(worker._loads, "_receive", receive)
    is_done = where != "device"
    event = SimpleNamespace(record=int, query=lambda: is_done, synchronize=int)
    monkeypatch.setattr(worker._loads, "_make_event", lambda: event)
    scheduler.on_new_request(request)
    if where != "link":
        decode.admit(request, D_BLOCKS)
        while not worker._loads._held:
            time.sleep(0.001)
        fails = pytest.raises(RuntimeError, match="new thread") if is_done else nullcontext()
        with fails:
            worker.release_loads(scheduler.take_started())
    else:
        worker.release_loads(["d"])
        decode.admit(request, D_BLOCKS)
    with pytest.raises(ConnectorDied, match=r"rank 0: RuntimeError.*new thread"):
        decode.step_until(decode.reports.received, "d")


def test_hung_worker_keeps_no_blocks_of_its_peer(stack: ExitStack, tmp_path: Path) -> None:
    """D's connector is alive with a request that waits for P's KV, while its step does not
    return."""
    leases = replace(CONFIG, lease_s=1.0)
    prefill, decode = start(stack, tmp_path, leases, step_timeout_s=1.0)
    params = prefill.prefill(FakeRequest("p", PROMPT, SEND), P_BLOCKS)
    decode.scheduler.on_new_request(FakeRequest("d", PROMPT, params))
    decode.scheduler.take_started()
    prefill.step_until(prefill.reports.sent, "p")
    assert prefill.scheduler.stats()["leases_expired"] == 1
