"""The parameters of a push: what D posts is what P parses."""

from __future__ import annotations

from typing import Any

import pytest

from mooncake_kv.errors import InvalidKVParams
from mooncake_kv.params import (
    InstanceAddress,
    KVTransferParams,
    TransferMode,
    build_reservation_params,
    parse_kv_transfer_params,
)

HOLDER = InstanceAddress("d-1", "127.0.0.1", 7000, 2, 16, lease_s=30.0)
PROMPT = tuple(range(40))
POSTED = build_reservation_params(HOLDER, "r-1", [3, 1, 2], PROMPT, 16)


def test_posted_params_are_parsed() -> None:
    kv_params = parse_kv_transfer_params(POSTED, PROMPT)
    assert kv_params.keeps_kv
    assert kv_params.mode is TransferMode.PUSH
    assert kv_params.target is not None
    assert kv_params.target.start == 16
    remote = kv_params.target.remote
    assert (remote.engine_id, remote.request_id, remote.host, remote.port) == (
        "d-1",
        "r-1",
        "127.0.0.1",
        7000,
    )
    assert (remote.block_ids, remote.num_tokens) == ((3, 1, 2), 40)
    assert remote.lease_s == 30.0


def test_other_prompt_of_same_length_is_rejected() -> None:
    with pytest.raises(InvalidKVParams, match="given another prompt of 40 tokens"):
        parse_kv_transfer_params(POSTED, PROMPT[::-1])


def test_json_names_are_the_field_names() -> None:
    names = {
        "token_ids",
        "do_remote_prefill",
        "do_remote_decode",
        "request_id",
        "remote_request_id",
        "remote_engine_id",
        "remote_host",
        "remote_port",
        "remote_block_ids",
        "remote_block_size",
        "remote_tp_size",
        "remote_pcp_size",
        "remote_dcp_size",
        "remote_cached_tokens",
        "num_prompt_tokens",
        "prompt_digest",
        "lease_seconds",
    }
    assert set(POSTED) == names


def test_params_with_metaserver_select_push() -> None:
    params = {"do_remote_prefill": True, "do_remote_decode": False, "metaserver": "http://x/y"}
    kv_params = parse_kv_transfer_params(params, PROMPT)
    assert kv_params == KVTransferParams(metaserver="http://x/y")
    assert kv_params.mode is TransferMode.PUSH


def test_pull_params_have_no_push_target() -> None:
    params = {"do_remote_decode": True, "remote_engine_id": None, "remote_block_ids": None}
    kv_params = parse_kv_transfer_params(params, PROMPT)
    assert kv_params == KVTransferParams(keeps_kv=True)
    assert kv_params.mode is TransferMode.PULL


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"remote_port": None}, "do_remote_decode needs remote_port"),
        ({"remote_block_ids": [[1], [2, 3]]}, "all of one length"),
        ({"remote_block_ids": [["x"]]}, "Expected `int`"),
        ({"remote_block_size": [16, 32]}, "one for all KV-cache groups"),
        ({"num_prompt_tokens": 39}, "the decode instance counted 39 prompt tokens"),
        ({"remote_cached_tokens": 41}, "the prompt has only 40 tokens"),
        ({"remote_cached_tokens": -1}, "Expected `int` >= 0"),
    ],
)
def test_invalid_targets_are_rejected_with_reason(change: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidKVParams, match=words):
        parse_kv_transfer_params({**POSTED, **change}, PROMPT)
