"""KV events on the wire: we publish what vLLM 0.33 does, and decode vLLM's and SGLang's.

In kv_events.json, vLLM's bytes were made by the classes of vLLM 0.33. SGLang's were not made by
SGLang: they follow the fields and the order that its ``disaggregation/kv_events.py`` declares, in
two forms read in its sources, the first one and the one with ``attn_dp_rank``, and in a form that
adds a ``medium`` as vLLM did, which was not read there. Its hashes are signed, its events arrays.
"""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from mooncake_conductor.index.holder_sets import Tier
from mooncake_conductor.index.kv_event_messages import (
    AllCleared,
    BlocksRemoved,
    BlocksStored,
    decode_batch,
)
from mooncake_kv.kv_events import (
    MEDIUM_GPU,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    encode_batch,
)

GOLDEN = json.loads((Path(__file__).parent / "kv_events.json").read_text())
OLD_LAYOUTS = {
    "sglang's layout, first": (None, Tier.DEVICE),
    "sglang's layout, with a rank": (0, Tier.DEVICE),
}
"""Fields that the publishers don't report: the rank, and the tier of a block."""


def test_published_events_equal_vllms() -> None:
    events = [
        AllBlocksCleared(),
        BlockRemoved([3, 2**64 - 1], "CPU"),
        BlockStored([7, 8], 3, [1, 2, 3, 4], 2, None, MEDIUM_GPU, None),
    ]
    ours, theirs = encode_batch(events, 1.5), bytes.fromhex(GOLDEN["vllm 0.33"])
    assert msgspec.msgpack.decode(ours) == msgspec.msgpack.decode(theirs)


@pytest.mark.parametrize("publisher", GOLDEN)
def test_conductor_decodes_events_of_every_publisher_alike(publisher: str) -> None:
    batch = decode_batch(bytes.fromhex(GOLDEN[publisher]))
    rank, removed_from = OLD_LAYOUTS.get(publisher, (0, Tier.HOST))
    assert (batch.published_at, batch.data_parallel_rank, batch.num_skipped) == (1.5, rank, 0)
    cleared, removed, stored = batch.events
    assert cleared == AllCleared()
    assert removed == BlocksRemoved((3, 2**64 - 1), removed_from)
    assert isinstance(stored, BlocksStored)
    assert (stored.keys, stored.parent, stored.tier) == ((7, 8), 3, Tier.DEVICE)
    assert (stored.token_ids, stored.block_size) == ((1, 2, 3, 4), 2)
