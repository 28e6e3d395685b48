"""Decodes KV events as published by vLLM and SGLang to one set of types.

A message has three frames: topic, sequence number (8 bytes, big-endian), msgpack. vLLM (since its
PR 42892) and SGLang (since its PR 37482) encode each event as a map with a ``type``; older versions
as an array that starts with the tag. A batch is an array ``[ts, events, data_parallel_rank]`` or a
map with these names. All variants are accepted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from mooncake_conductor.errors import MalformedEvent
from mooncake_conductor.index.holder_sets import Tier

KEY_MASK = (1 << 64) - 1
REPLAY_END = (-1).to_bytes(8, "big", signed=True)
"""The sequence number that ends a replay, and a snapshot."""
SNAPSHOT_REQUEST = b"snapshot"
"""Requests a snapshot of all that a publisher holds (vLLM's pull request 50134). A publisher that
does not support it reads a sequence number that no batch has, and sends an empty answer."""

_TIERS = {
    None: Tier.DEVICE,
    "GPU": Tier.DEVICE,
    "NPU": Tier.DEVICE,
    "CPU": Tier.HOST,
    "CPU_PINNED": Tier.HOST,
    "CPU_TIER1": Tier.HOST,
    "CPU_TIER2": Tier.HOST,
}
"""Tiers by medium, in capitals; any other medium counts as a slower tier (DISK)."""

_STORED = (
    *("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium"),
    *("lora_name", "extra_keys", "group_idx", "kv_cache_spec_kind"),
)
_REMOVED = ("block_hashes", "medium", "group_idx")


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """An instance holds these blocks now.

    Args:
        keys: the low 64 bits of each block's hash, in the order of the prompt.
        parent: hash of the first block's parent; None at the start of a prompt.
        block_size: tokens per block.
        tier: where the blocks are held.
        token_ids: token ids of all blocks; empty if not published.
        lora_name: adapter with which the blocks were computed.
        group: KV-cache group of layers; None if the model has only one.
        is_full_attention: whether any prefix of the blocks can be reused (no sliding window).
        cache_salt: salt of the tenant to whom the prompt belongs.
        namespace: for a node store that several models use: whose blocks they are; empty if not
            published.
    """

    keys: tuple[int, ...]
    parent: int | None
    block_size: int
    tier: Tier
    token_ids: tuple[int, ...] = ()
    lora_name: str | None = None
    group: int | None = None
    is_full_attention: bool = True
    cache_salt: str = ""
    namespace: str = ""


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """An instance no longer holds these blocks in a tier."""

    keys: tuple[int, ...]
    tier: Tier
    group: int | None = None


@dataclass(frozen=True, slots=True)
class AllCleared:
    """An instance holds nothing any more."""


KVEvent = BlocksStored | BlocksRemoved | AllCleared


@dataclass(frozen=True, slots=True)
class EventBatch:
    """The decoded content of one message.

    Args:
        published_at: time by the publisher's clock, in seconds.
        events: the events, in order.
        data_parallel_rank: the rank that published it; None if there is only one.
        num_skipped: number of events of unknown types, and of stored blocks that can't be used.
    """

    published_at: float
    events: tuple[KVEvent, ...]
    data_parallel_rank: int | None = None
    num_skipped: int = field(default=0, compare=False)


def decode_batch(payload: bytes) -> EventBatch:
    """Decode the third frame of a message.

    Stored blocks that can't be used are left out alone: the index then misses them. vLLM's
    offloading publishes such ones by default, for every block. A removal that can't be read fails
    the batch, as its blocks would seem to be held for ever.

    Raises:
        MalformedEvent: the payload is not a batch of events.
    """
    try:
        raw = msgspec.msgpack.decode(payload)
        if isinstance(raw, Mapping):
            raw = [raw["ts"], raw["events"], raw.get("data_parallel_rank")]
        published_at, events, *rest = raw
        decoded = [_event(event) for event in events]
        known = tuple(event for event in decoded if event is not None)
        rank = rest[0] if rest else None
        if not isinstance(published_at, int | float) or not isinstance(rank, int | None):
            raise MalformedEvent(f"a batch is [ts, events, rank], found {_shown(raw)}")
        return EventBatch(float(published_at), known, rank, len(decoded) - len(known))
    except MalformedEvent:
        raise
    except (msgspec.DecodeError, KeyError, TypeError, ValueError, RecursionError) as exc:
        raise MalformedEvent(f"no batch of KV events: {exc!r} in {payload[:64]!r}") from exc


def decode_sequence(frame: bytes) -> int:
    """Decode the second frame: 8 bytes, or 24 with the publisher's id appended; -1 ends a replay.

    Raises:
        MalformedEvent: the frame has another length.
    """
    if len(frame) not in (8, 24):
        raise MalformedEvent(f"a sequence number has 8 or 24 bytes, found {len(frame)}")
    return int.from_bytes(frame[:8], "big", signed=True)


def normalise_key(value: Any) -> int:
    """The key of a block hash, which may be a signed or unsigned number or bytes.

    Raises:
        MalformedEvent: it is neither.
    """
    if isinstance(value, bytes):
        value = int.from_bytes(value, "big")
    if not isinstance(value, int) or isinstance(value, bool):
        raise MalformedEvent(f"a block hash is a number or bytes, found {_shown(value)}")
    return value & KEY_MASK


def _keys(values: Any) -> tuple[int, ...]:
    """All keys of an event. Most publishers send unsigned numbers, which need no conversion."""
    if values and set(map(type, values)) == {int} and min(values) >= 0:
        return tuple(values)
    return tuple(normalise_key(value) for value in values)


def _event(raw: Any) -> KVEvent | None:
    """Decode one event; None if its type is unknown, or if it stores blocks that can't be used."""
    tag, fields = _fields(raw)
    if tag == "BlockStored":
        try:
            return _stored(fields)
        except (MalformedEvent, KeyError, TypeError, ValueError):
            return None
    if tag == "BlockRemoved":
        return BlocksRemoved(_keys(fields["block_hashes"]), _tier(fields), _group(fields))
    return AllCleared() if tag == "AllBlocksCleared" else None


def _fields(raw: Any) -> tuple[str, Mapping[str, Any]]:
    if isinstance(raw, Mapping):
        return raw["type"], raw
    if not isinstance(raw, Sequence) or isinstance(raw, str | bytes) or not raw:
        raise MalformedEvent(f"an event is a map or an array, found {_shown(raw)}")
    tag, *values = raw
    names = {"BlockStored": _STORED, "BlockRemoved": _REMOVED}.get(tag, ())
    fields = dict(zip(names, values, strict=False))
    # SGLang has a map of its own fields where vLLM has the adapter's name.
    if isinstance(others := fields.get("lora_name"), Mapping):
        fields |= {"lora_name": None, "cache_salt": others.get("cache_salt")}
    return tag, fields


def _stored(fields: Mapping[str, Any]) -> BlocksStored:
    parent = fields.get("parent_block_hash")
    lora_name = fields.get("lora_name")
    is_nameless = lora_name is None and fields.get("lora_id") is not None
    # SGLang names the salt, vLLM has it among the extra keys.
    salt = fields.get("cache_salt") or _salt_in(fields.get("extra_keys"), lora_name)
    kind = fields.get("kv_cache_spec_kind")
    block_size = fields["block_size"]
    if not isinstance(block_size, int) or block_size < 1:
        raise MalformedEvent(f"block_size is a positive number, found {_shown(block_size)}")
    if not isinstance(lora_name, str | None) or not isinstance(salt, str | None):
        raise MalformedEvent(
            f"lora_name and cache_salt are strings, found {_shown(lora_name)}, {_shown(salt)}"
        )
    return BlocksStored(
        _keys(fields["block_hashes"]),
        None if parent is None else normalise_key(parent),
        block_size,
        _tier(fields),
        # Without token ids the blocks get no keys. That applies to blocks that depend on more than
        # tokens, adapter and salt, and to adapters with only a number (older publishers), because
        # requests name their adapter.
        () if salt is None or is_nameless else _token_ids(fields),
        lora_name,
        _group(fields),
        kind is None or kind in ("full_attention", "mla_attention"),
        salt or "",
        fields.get("namespace") or "",
    )


def _salt_in(extra_keys: Any, lora_name: str | None) -> str | None:
    """The cache salt in the extra keys of blocks, a list per block.

    None if the blocks depend on anything else, such as an image.
    """
    salt = ""
    for block, extras in enumerate(extra_keys or ()):
        others = list(extras or ())
        if lora_name in others:
            others.remove(lora_name)  # only once: a salt may be equal to it
        if not others:
            continue
        if block or len(others) > 1 or not isinstance(others[0], str):
            return None
        salt = others[0]
    return salt


def _token_ids(fields: Mapping[str, Any]) -> tuple[int, ...]:
    token_ids = tuple(fields.get("token_ids") or ())
    if token_ids and (set(map(type, token_ids)) != {int} or min(token_ids) < 0):
        raise MalformedEvent(f"token ids are numbers from 0 on, found {_shown(token_ids)}")
    return token_ids


def _group(fields: Mapping[str, Any]) -> int | None:
    group = fields.get("group_idx")
    if not isinstance(group, int | None):
        raise MalformedEvent(f"group_idx is a number, found {_shown(group)}")
    return group


def _tier(fields: Mapping[str, Any]) -> Tier:
    medium = fields.get("medium")
    return _TIERS.get(medium.upper() if isinstance(medium, str) else medium, Tier.DISK)


def _shown(value: Any) -> str:
    return repr(value)[:80]
