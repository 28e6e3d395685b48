"""Checks of an engine request against what the engine supports."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mooncake_engine.admission import check_request
from mooncake_engine.errors import InvalidRequest
from mooncake_engine.messages import EngineInfo, EngineRequest
from mooncake_engine.sampling_params import SamplingParams
from mooncake_kv.params import KVTransferParams, TransferMode

FACTS = EngineInfo(64, 50, (3,), 16, 16, "engine")


def check(sampling: SamplingParams) -> None:
    check_request(EngineRequest("r", (1, 2), sampling), FACTS, TransferMode.NONE)


def test_keeping_kv_is_rejected_where_peers_cannot_read_it() -> None:
    wanted = KVTransferParams(keeps_kv=True)
    request = EngineRequest("r", (1, 2), SamplingParams(), kv_transfer_params=wanted)
    check_request(request, FACTS, TransferMode.PULL)
    with pytest.raises(InvalidRequest, match="a layout that only its own device can read"):
        check_request(request, replace(FACTS, lends_kv=False), TransferMode.PULL)


def test_token_ids_outside_the_vocabulary_are_rejected() -> None:
    with pytest.raises(InvalidRequest, match=r"logit_bias must be token ids in \[0, 50\), got 50"):
        check(SamplingParams(logit_bias=((50, 1.0),)))
    with pytest.raises(InvalidRequest, match=r"allowed_token_ids must be .* got 50"):
        check(SamplingParams(allowed_token_ids=(1, 50)))
    with pytest.raises(InvalidRequest, match=r"bad_words must be .* got 50"):
        check(SamplingParams(bad_words_token_ids=((1,), (3, 50))))
    with pytest.raises(InvalidRequest, match=r"stop_token_ids must be .* got -1"):
        check(SamplingParams(stop_token_ids=(-1,)))


def test_token_ids_inside_the_vocabulary_are_accepted() -> None:
    check(SamplingParams(logit_bias=((49, 1.0),), stop_token_ids=(0,), allowed_token_ids=(49,)))
