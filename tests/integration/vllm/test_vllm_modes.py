"""P and D whose connectors transfer KV in different modes: D is notified, and computes the prompt.

D reserves blocks and posts them to a metaserver, which sends P the request, as the proxy does.
"""

from __future__ import annotations

import logging
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from support.metaserver import Post
from support.vllm_caches import filled_ranks
from support.vllm_instance import FakeRequest, running

from mooncake_hal.kv.geometry import AttentionKind
from mooncake_kv.config import KVTransferConfig
from mooncake_vllm.vllm_memory import ModelKV

MODEL = ModelKV(AttentionKind.GQA, 2, 4, (8, 8), "float32")
PULL = KVTransferConfig(transports=("tcp",), advertise_host="127.0.0.1", lease_s=600.0)
PUSH = replace(PULL, connector="MooncakeLayerwiseConnector")
PROMPT = list(range(100, 114))
BLOCKS = [5, 1, 4, 2]


@pytest.mark.parametrize(
    ("prefill_config", "decode_config", "extra", "wanted"),
    [
        (PULL, PUSH, {}, "asked for KV transfer by push, but its connector does pull"),
        (PUSH, PULL, {"do_pull": True}, "asked for KV transfer by pull, but its connector does"),
    ],
    ids=["P pulls, D is pushed to", "P pushes, D pulls"],
)
def test_load_fails_at_once_if_the_prefill_has_another_mode(
    stack: ExitStack,
    tmp_path: Path,
    post: Post,
    caplog: pytest.LogCaptureFixture,
    prefill_config: KVTransferConfig,
    decode_config: KVTransferConfig,
    extra: dict[str, object],
    wanted: str,
) -> None:
    caplog.set_level(logging.INFO)
    first, second = (filled_ranks(MODEL, "LBHNC", 1, seed=seed) for seed in (1, 2))
    prefill = stack.enter_context(running("p", tmp_path, first, prefill_config))
    decode = stack.enter_context(running("d", tmp_path, second, decode_config))
    params = {"do_remote_prefill": True, "metaserver": post.server.url("d")} | extra
    waiting = FakeRequest("d", PROMPT, params)
    decode.scheduler.on_new_request(waiting)
    assert decode.admit(waiting, BLOCKS) == len(PROMPT)
    decode.step()
    request = FakeRequest("p", PROMPT, {"do_remote_decode": True} | post.wait())
    prefill.scheduler.on_new_request(request)
    decode.step_until(decode.reports.received, "d")
    assert decode.reports.failed == {"d"}
    assert wanted in caplog.text
    assert prefill.scheduler.num_refused == 1
    assert prefill.finish(request, BLOCKS) == (False, None)
    prefill.step()
    assert not prefill.reports.sent


def test_prefill_frees_its_kv_if_the_decode_instance_is_pushed_to(
    stack: ExitStack, tmp_path: Path
) -> None:
    first, second = (filled_ranks(MODEL, "LBHNC", 1, seed=seed) for seed in (1, 2))
    prefill = stack.enter_context(running("p", tmp_path, first, PULL))
    decode = stack.enter_context(running("d", tmp_path, second, PUSH))
    params = prefill.prefill(FakeRequest("p", PROMPT, {"do_remote_decode": True}), BLOCKS)
    reader = FakeRequest("d", PROMPT, params)
    decode.scheduler.on_new_request(reader)
    assert decode.scheduler.get_num_new_matched_tokens(reader, 0) == 0
    prefill.step_until(prefill.reports.sent, "p")
