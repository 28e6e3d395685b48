"""A decode instance's post to the metaserver equals the proxy's golden file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mooncake_kv.params import (
    InstanceAddress,
    TransferMode,
    build_reservation_params,
    parse_kv_transfer_params,
    prompt_digest,
)

GOLDEN = json.loads((Path(__file__).parent / "proxy" / "push_completion.json").read_text())
PROMPT = tuple(range(200))
OURS = {
    "remote_request_id": "cmpl-r-0",
    "num_prompt_tokens": 200,
    "prompt_digest": prompt_digest(PROMPT),
    "lease_seconds": 30.0,
}
"""Fields that we add: the reservation's id, checks of the prompt, and the keepalive timeout."""


def test_post_equals_golden_file() -> None:
    wanted: dict[str, Any] = GOLDEN["decode_posts"]
    holder = InstanceAddress("d-1", "127.0.0.1", 5700, 1, 128, lease_s=30.0)
    posted = build_reservation_params(holder, "cmpl-r-0", [1, 2], PROMPT, 0)
    assert posted == {**wanted, **OURS}


def test_both_sides_parse_the_params_of_the_proxy() -> None:
    asked = parse_kv_transfer_params(GOLDEN["to_decode"]["kv_transfer_params"], PROMPT)
    sent = parse_kv_transfer_params({**GOLDEN["to_prefill"]["kv_transfer_params"], **OURS}, PROMPT)
    assert asked.mode is sent.mode is TransferMode.PUSH
    assert asked.metaserver == "http://127.0.0.1:8000/v1/metaserver/KEY"
    assert sent.target is not None
    assert sent.target.remote.block_ids == (1, 2)
