"""KV-cache groups: layers with a sliding window have blocks of their own.

vLLM drops the blocks that have left the window. A prompt is transferred group by group, through the
connector's two sides without vLLM.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.metaserver import Post
from support.vllm_caches import filled_ranks
from support.vllm_instance import FakeRequest, FakeVllm, running

from mooncake_hal.kv.geometry import AttentionKind, KVGroup
from mooncake_kv.config import KVTransferConfig
from mooncake_vllm.vllm_memory import LINEAR, ModelKV

WINDOW = 6
MODEL = ModelKV(
    AttentionKind.GQA, 4, 4, (8, 8), "float32", (KVGroup((0, 2), WINDOW), KVGroup((1, 3)))
)
PULL = KVTransferConfig(transports=("tcp",), advertise_host="127.0.0.1")
PUSH = replace(PULL, connector="MooncakeLayerwiseConnector")
PROMPT = list(range(100, 114))
# blocks of 4 tokens: the window of token 14 reaches back to token 9, in the third of them
P_BLOCKS: tuple[list[int], ...] = ([0, 0, 4, 2], [5, 1, 6, 3])
D_BLOCKS: tuple[list[int], ...] = ([0, 0, 3, 7], [6, 2, 1, 5])
SEND = {"do_remote_decode": True}


def start(
    stack: ExitStack,
    folder: Path,
    config: KVTransferConfig,
    tps: tuple[int, int] = (1, 1),
    window: int = WINDOW,
    format: str = LINEAR,
) -> tuple[FakeVllm, FakeVllm]:
    model = replace(MODEL, groups=(KVGroup((0, 2), window), KVGroup((1, 3))))
    first, second = (
        filled_ranks(model, "LBHNC", tp_size, seed=seed, format=format)
        for seed, tp_size in enumerate(tps, start=1)
    )
    return (
        stack.enter_context(running("p", folder, first, config)),
        stack.enter_context(running("d", folder, second, config)),
    )


def memory(instance: FakeVllm) -> Any:
    """``[layers, blocks, heads, tokens, content]`` of all ranks."""
    return np.concatenate([rank.stacked() for rank in instance.caches], axis=2)


def check_arrived(decode: FakeVllm, prefill: FakeVllm, before: Any, format: str) -> None:
    """Check that the blocks that D keeps equal P's and that nothing else has changed."""
    wanted, source = before, memory(prefill)
    for layer in range(MODEL.layers):
        for ours, theirs in zip(D_BLOCKS[layer % 2], P_BLOCKS[layer % 2], strict=True):
            last = 2 if theirs in (P_BLOCKS[0][3], P_BLOCKS[1][3]) and format == LINEAR else 4
            if ours:
                for shared in (layer, layer ^ 1):  # the other group's layer in the same tensor
                    wanted[shared, ours, :, :last] = source[layer, theirs, :, :last]
    assert (memory(decode) == wanted).all()


@pytest.mark.parametrize("tps", [(1, 1), (2, 1), (1, 2)])
def test_blocks_within_window_are_pulled(
    stack: ExitStack, tmp_path: Path, tps: tuple[int, int]
) -> None:
    prefill, decode = start(stack, tmp_path, PULL, tps)
    before = memory(decode)
    params = prefill.prefill(FakeRequest("one", PROMPT, SEND), P_BLOCKS)
    assert params["remote_block_ids"] == [[0, 0, 4, 2], [5, 1, 6, 3]]
    assert params["num_prompt_blocks"] == 4
    request = FakeRequest("two", PROMPT, params)
    decode.scheduler.on_new_request(request)
    assert decode.admit(request, D_BLOCKS) == len(PROMPT)
    decode.step_until(decode.reports.received, "two")
    prefill.step_until(prefill.reports.sent, "one")
    assert not decode.reports.failed
    check_arrived(decode, prefill, before, LINEAR)


@pytest.mark.parametrize("names_layers", [True, False])
@pytest.mark.parametrize(
    ("tps", "format"),
    [((1, 1), LINEAR), ((2, 1), LINEAR), ((1, 2), LINEAR), ((1, 1), "vllm-cpu/vec/4")],
)
def test_blocks_within_window_are_pushed(
    stack: ExitStack,
    tmp_path: Path,
    tps: tuple[int, int],
    format: str,
    names_layers: bool,
) -> None:
    post = Post()
    stack.callback(post.close)
    prefill, decode = start(stack, tmp_path, PUSH, tps, format=format)
    before = memory(decode)
    waiting = FakeRequest(
        "d", PROMPT, {"do_remote_prefill": True, "metaserver": post.server.url("d")}
    )
    decode.scheduler.on_new_request(waiting)
    assert decode.admit(waiting, D_BLOCKS) == len(PROMPT)
    decode.step()
    request = FakeRequest("p", PROMPT, post.wait())
    prefill.scheduler.on_new_request(request)
    chunks = (4, 9, len(PROMPT))
    assert prefill.compute(request, P_BLOCKS, chunks, names_layers=names_layers) == (True, None)
    prefill.step_until(prefill.reports.sent, "p")
    decode.step_until(decode.reports.received, "d")
    assert not decode.reports.failed
    check_arrived(decode, prefill, before, format)


def test_prefill_that_lacks_a_window_block_returns_no_kv_params(
    stack: ExitStack, tmp_path: Path
) -> None:
    prefill, _ = start(stack, tmp_path, PULL)
    request = FakeRequest("one", PROMPT, SEND)
    prefill.scheduler.on_new_request(request)
    request.num_computed_tokens, request.output_token_ids = len(PROMPT), [7]
    request.status.name = "FINISHED_LENGTH_CAPPED"
    dropped = [0, 0, 0, 2], P_BLOCKS[1]
    assert prefill.scheduler.request_finished(request, dropped) == (False, None)


def test_token_outside_prefill_window_is_not_awaited(stack: ExitStack, tmp_path: Path) -> None:
    prefill, decode = start(stack, tmp_path, PULL, window=WINDOW + 1)
    params = prefill.prefill(FakeRequest("one", PROMPT, SEND), P_BLOCKS)
    again = FakeRequest(
        "again", PROMPT, dict(params)
    )  # computes token 13, which looks back at token 7
    decode.scheduler.on_new_request(again)
    assert decode.scheduler.get_num_new_matched_tokens(again, 0) == 0
    assert decode.scheduler.num_refused == 1
    prefill.step_until(prefill.reports.sent, "one")

    params = prefill.prefill(FakeRequest("three", PROMPT, SEND), P_BLOCKS)
    params |= {"first_token_delivered": True}
    beyond = FakeRequest("beyond", [*PROMPT, params["last_token_id"]], params)
    decode.scheduler.on_new_request(beyond)
    assert decode.admit(beyond, D_BLOCKS) == len(PROMPT)
    decode.step_until(decode.reports.received, "beyond")
    assert not decode.reports.failed


def test_params_of_instance_without_groups_are_rejected(stack: ExitStack, tmp_path: Path) -> None:
    prefill, decode = start(stack, tmp_path, PULL)
    params = prefill.prefill(FakeRequest("one", PROMPT, SEND), P_BLOCKS)
    params["remote_block_ids"] = params["remote_block_ids"][:1]
    request = FakeRequest("two", PROMPT, params)
    decode.scheduler.on_new_request(request)
    assert decode.admit(request, D_BLOCKS) == len(PROMPT)
    decode.step_until(decode.reports.received, "two")
    assert decode.reports.failed == {"two"}
    prefill.step_until(prefill.reports.sent, "one")
