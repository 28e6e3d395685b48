"""KV events on the wire: what we publish is what vLLM 0.33 publishes, value for value, and what
vLLM and SGLang publish is understood.

In kv_events.json the bytes of vLLM were made by the classes of vLLM 0.33. Those of SGLang were not
made by SGLang: they follow the fields that its ``disaggregation/kv_events.py`` declares, in their
order: its first form, the one with ``attn_dp_rank`` (both read in its sources), and one that adds a
``medium`` as vLLM did, which was not read there. Its hashes are signed, its events arrays.
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
"""What they don't say: the rank, and where a block lay."""


def test_what_we_publish_is_what_vllm_publishes() -> None:
    events = [
        AllBlocksCleared(),
        BlockRemoved([3, 2**64 - 1], "CPU"),
        BlockStored([7, 8], 3, [1, 2, 3, 4], 2, None, MEDIUM_GPU, None),
    ]
    ours, theirs = encode_batch(events, 1.5), bytes.fromhex(GOLDEN["vllm 0.33"])
    assert msgspec.msgpack.decode(ours) == msgspec.msgpack.decode(theirs)


@pytest.mark.parametrize("publisher", GOLDEN)
def test_all_publishers_say_the_same_to_the_conductor(publisher: str) -> None:
    batch = decode_batch(bytes.fromhex(GOLDEN[publisher]))
    rank, removed_from = OLD_LAYOUTS.get(publisher, (0, Tier.HOST))
    assert (batch.published_at, batch.data_parallel_rank, batch.num_skipped) == (1.5, rank, 0)
    cleared, removed, stored = batch.events
    assert cleared == AllCleared()
    assert removed == BlocksRemoved((3, 2**64 - 1), removed_from)
    assert isinstance(stored, BlocksStored)
    assert (stored.keys, stored.parent, stored.tier) == ((7, 8), 3, Tier.DEVICE)
    assert (stored.token_ids, stored.block_size) == ((1, 2, 3, 4), 2)
