"""A request with non-finite logits fails with the reason; others continue unaffected."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.core_runs import make_load, run_load

from mooncake_engine.messages import FinishReason
from mooncake_engine.sampling_params import SamplingParams
from mooncake_engine.speculative_config import SpeculativeConfig, SpeculativeMethod

VOCAB = 307
PLAIN = SamplingParams(temperature=1.0, max_tokens=12)
NOTHING_LEFT = replace(PLAIN, min_tokens=3, stop_token_ids=tuple(range(VOCAB)), seed=5)
MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "async": {"async_scheduling": True},
    "ngram": {"speculative_config": SpeculativeConfig(SpeculativeMethod.NGRAM)},
    "two ranks": {"tp_size": 2},
}


@pytest.mark.parametrize("mode", MODES)
def test_request_that_masks_every_token_fails_alone(checkpoint: Path, mode: str) -> None:
    requests = make_load(PLAIN, sizes=[1, 1, 1])
    expected = run_load(checkpoint, requests, num_kv_blocks=64, **MODES[mode])
    broken = replace(requests[1], sampling=NOTHING_LEFT)
    found = run_load(
        checkpoint, [requests[0], broken, requests[2]], num_kv_blocks=64, **MODES[mode]
    )
    last = found.updates[broken.request_id][-1]
    assert last.finish is FinishReason.ERROR
    assert last.error is not None
    assert "no finite logit" in last.error
    for request in (requests[0], requests[2]):
        name = request.request_id
        tokens = [token for update in found.updates[name] for token in update.token_ids]
        assert tokens == [t for update in expected.updates[name] for t in update.token_ids]
