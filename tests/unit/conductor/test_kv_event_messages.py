"""KV events are decoded in every format that engines publish."""

from __future__ import annotations

import msgspec
import pytest

from mooncake_conductor.errors import MalformedEvent
from mooncake_conductor.index.holder_sets import Tier
from mooncake_conductor.index.kv_event_messages import (
    AllCleared,
    BlocksRemoved,
    BlocksStored,
    decode_batch,
    decode_sequence,
)

PACK = msgspec.msgpack.encode
AS_MAPS = [
    {
        "type": "BlockStored",
        "block_hashes": [7, -1],
        "parent_block_hash": None,
        "token_ids": [1, 2, 3, 4],
        "block_size": 2,
        "medium": "GPU",
        "lora_name": None,
        "somewhat_new": 3,
    },
    {"type": "BlockRemoved", "block_hashes": [7], "medium": "CPU"},
    {"type": "AllBlocksCleared"},
]
AS_ARRAYS = [
    ["BlockStored", [7, 2**64 - 1], None, [1, 2, 3, 4], 2, None, "GPU", None],
    ["BlockRemoved", [7], "CPU_PINNED"],
    ["AllBlocksCleared"],
]
WANTED = (
    BlocksStored((7, 2**64 - 1), None, 2, Tier.DEVICE, (1, 2, 3, 4)),
    BlocksRemoved((7,), Tier.HOST),
    AllCleared(),
)


@pytest.mark.parametrize("events", [AS_MAPS, AS_ARRAYS])
@pytest.mark.parametrize("as_map", [True, False])
def test_maps_and_arrays_decode_alike(events, as_map: bool) -> None:
    batch = {"ts": 1.5, "events": events, "data_parallel_rank": 3} if as_map else [1.5, events, 3]
    found = decode_batch(PACK(batch))
    assert found.events == WANTED
    assert (found.published_at, found.data_parallel_rank, found.num_skipped) == (1.5, 3, 0)


def test_defaults_are_optional_and_unknown_types_are_counted() -> None:
    found = decode_batch(PACK([1, [["BlockRemoved", [b"\x01" * 32]], {"type": "Novel"}]]))
    assert found.events == (BlocksRemoved((0x0101010101010101,), Tier.DEVICE),)
    assert (found.data_parallel_rank, found.num_skipped) == (None, 1)


@pytest.mark.parametrize(
    "event",
    [
        AS_MAPS[0] | {"cache_salt": "tenant"},
        [*AS_ARRAYS[0][:7], {"cache_salt": "tenant"}],
        AS_MAPS[0] | {"extra_keys": [["tenant"], None]},
    ],
    ids=["SGLang's map", "SGLang's array", "vLLM's map"],
)
def test_salt_is_found_where_each_engine_has_it(event) -> None:
    (stored,) = decode_batch(PACK([1, [event]])).events
    assert isinstance(stored, BlocksStored)
    assert (stored.cache_salt, stored.lora_name) == ("tenant", None)
    assert stored.token_ids == (1, 2, 3, 4)


@pytest.mark.parametrize("medium", ["STORAGE", "DISK", "TAPE"])
def test_storage_and_unknown_media_are_the_disk_tier(medium: str) -> None:
    """The name that vLLM uses, the one of SGLang and our older stores, and an unknown one."""
    event = {"type": "BlockRemoved", "block_hashes": [1], "medium": medium}
    assert decode_batch(PACK([1, [event]])).events == (BlocksRemoved((1,), Tier.DISK),)


def test_names_of_media_are_read_in_any_case() -> None:
    """vLLM's worker of Mooncake's store names the same memory in small letters."""
    event = {"type": "BlockRemoved", "block_hashes": [1], "medium": "cpu"}
    assert decode_batch(PACK([1, [event]])).events == (BlocksRemoved((1,), Tier.HOST),)


@pytest.mark.parametrize(
    "unusable",
    [
        # vLLM's OffloadingConnector, by default, for every block that it saves.
        {
            "type": "BlockStored",
            "block_hashes": [b"\1" * 32],
            "parent_block_hash": None,
            "token_ids": [],
            "block_size": 0,
            "medium": "CPU",
            "group_idx": 0,
        },
        ["BlockStored", [1], None, [[1, 2], [2, 3]], 2],  # bigrams in place of tokens
        ["BlockStored", [1], None, [1, -2], 2],
        ["BlockStored", [True], None, [], 2],
        ["BlockStored", [1], None, [], 2, None, "GPU", ["adapter"]],
        ["BlockStored", [1], None, [], 2, None, "GPU", None, None, "group"],
        ["BlockStored", [1], None, [], 2, None, ["GPU"]],
        ["BlockStored"],
    ],
)
def test_stored_blocks_that_cannot_be_used_are_left_out_alone(unusable) -> None:
    found = decode_batch(PACK([1, [*AS_MAPS, unusable, *AS_ARRAYS]]))
    assert found.events == (*WANTED, *WANTED)
    assert found.num_skipped == 1


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\xff\xff",
        PACK(None),
        PACK("abc"),
        PACK([]),
        PACK([1]),
        PACK(["now", []]),
        PACK([1, [], "rank"]),
        PACK([1, ["BlockStored"]]),
        PACK([1, [["BlockRemoved"]]]),
        PACK([1, [["BlockRemoved", [True], "GPU"]]]),
        PACK([1, [["BlockRemoved", [1], "GPU", [0]]]]),
        PACK([1, [{"block_hashes": []}]]),
        PACK([1, [[]]]),
        PACK([1, 5]),
        b"\x91" * 100_000 + b"\xc0",  # nested
    ],
)
def test_malformed_message_is_rejected(raw: bytes) -> None:
    with pytest.raises(MalformedEvent):
        decode_batch(raw)


def test_sequence_numbers_are_decoded() -> None:
    assert decode_sequence((5).to_bytes(8, "big")) == 5
    assert decode_sequence((5).to_bytes(8, "big") + bytes(16)) == 5
    assert decode_sequence(b"\xff" * 8) == -1
    with pytest.raises(MalformedEvent, match="8 or 24 bytes, found 3"):
        decode_sequence(b"abc")
