"""KV events on the wire, as vLLM and SGLang publish them: decoded into one form.

Three frames: topic, sequence number (8 bytes, big-endian), msgpack. vLLM since its PR 42892 writes
each event as a map with a ``type``; before that, and SGLang, as an array that begins with the tag.
A batch is an array ``[ts, events, data_parallel_rank]`` or a map with these names. All are read.
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
SNAPSHOT_QUESTION = b"snapshot"
"""Asks a publisher for all that it holds (vLLM's pull request 50134). To one that does not know it
it is a sequence number that no batch has: the answer is empty."""

_TIERS = {
    None: Tier.DEVICE,
    "GPU": Tier.DEVICE,
    "NPU": Tier.DEVICE,
    "CPU": Tier.HOST,
    "CPU_PINNED": Tier.HOST,
    "CPU_TIER1": Tier.HOST,
    "CPU_TIER2": Tier.HOST,
}
"""Any other medium is a slower one."""

_STORED = (
    *("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium"),
    *("lora_name", "extra_keys", "group_idx", "kv_cache_spec_kind"),
)
_REMOVED = ("block_hashes", "medium", "group_idx")


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """An instance holds these blocks now.

    Args:
        keys: the low 64 bits of each block's hash, in order of the prompt.
        parent: of the first block; None at the beginning of a prompt.
        block_size: tokens per block.
        tier: where they lie.
        token_ids: of all the blocks; empty where the publisher does not say.
        lora_name: adapter that they were computed with.
        group: of layers with one kind of cache; None if the model has one.
        is_full_attention: whether a prefix of them can be reused as such.
        cache_salt: of the tenant whose prompt it is.
        namespace: of a store that several models use: whose blocks they are; empty if not said.
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
    """An instance no longer holds these blocks in that tier."""

    keys: tuple[int, ...]
    tier: Tier
    group: int | None = None


@dataclass(frozen=True, slots=True)
class AllCleared:
    """An instance holds nothing any more."""


KVEvent = BlocksStored | BlocksRemoved | AllCleared


@dataclass(frozen=True, slots=True)
class EventBatch:
    """What one message says.

    Args:
        published_at: by the publisher's clock, in seconds.
        events: in order.
        data_parallel_rank: that published it; None if there is one.
        num_skipped: events of a type that is not known here.
    """

    published_at: float
    events: tuple[KVEvent, ...]
    data_parallel_rank: int | None = None
    num_skipped: int = field(default=0, compare=False)


def decode_batch(payload: bytes) -> EventBatch:
    """The third frame of a message.

    Raises:
        MalformedEvent: it is no batch of events; says what was found.
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
    except (msgspec.DecodeError, KeyError, TypeError, ValueError) as exc:
        raise MalformedEvent(f"no batch of KV events: {exc!r} in {payload[:64]!r}") from exc


def decode_sequence(frame: bytes) -> int:
    """The second frame: 8 bytes, or 24 with the publisher's id behind them; -1 ends a replay.

    Raises:
        MalformedEvent: it has another length.
    """
    if len(frame) not in (8, 24):
        raise MalformedEvent(f"a sequence number has 8 or 24 bytes, found {len(frame)}")
    return int.from_bytes(frame[:8], "big", signed=True)


def normalise_key(value: Any) -> int:
    """One key for one hash, whether it came as signed or unsigned number or as bytes.

    Raises:
        MalformedEvent: it is neither.
    """
    if isinstance(value, bytes):
        value = int.from_bytes(value, "big")
    if not isinstance(value, int) or isinstance(value, bool):
        raise MalformedEvent(f"a block hash is a number or bytes, found {_shown(value)}")
    return value & KEY_MASK


def _keys(values: Any) -> tuple[int, ...]:
    """All keys of an event; most publishers send unsigned numbers, which are taken as they are."""
    if values and set(map(type, values)) == {int} and min(values) >= 0:
        return tuple(values)
    return tuple(normalise_key(value) for value in values)


def _event(raw: Any) -> KVEvent | None:
    """One event; None if its type is not known."""
    tag, fields = _fields(raw)
    if tag == "BlockStored":
        return _stored(fields)
    if tag == "BlockRemoved":
        return BlocksRemoved(_keys(fields["block_hashes"]), _tier(fields), fields.get("group_idx"))
    return AllCleared() if tag == "AllBlocksCleared" else None


def _fields(raw: Any) -> tuple[str, Mapping[str, Any]]:
    if isinstance(raw, Mapping):
        return raw["type"], raw
    if not isinstance(raw, Sequence) or isinstance(raw, str | bytes) or not raw:
        raise MalformedEvent(f"an event is a map or an array, found {_shown(raw)}")
    tag, *values = raw
    names = {"BlockStored": _STORED, "BlockRemoved": _REMOVED}.get(tag, ())
    return tag, dict(zip(names, values, strict=False))


def _stored(fields: Mapping[str, Any]) -> BlocksStored:
    parent = fields.get("parent_block_hash")
    lora_name = fields.get("lora_name")
    is_nameless = lora_name is None and fields.get("lora_id") is not None
    salt = _salt_in(fields.get("extra_keys"), lora_name)
    kind = fields.get("kv_cache_spec_kind")
    block_size = fields["block_size"]
    if not isinstance(block_size, int) or block_size < 1:
        raise MalformedEvent(f"block_size is a positive number, found {_shown(block_size)}")
    return BlocksStored(
        _keys(fields["block_hashes"]),
        None if parent is None else normalise_key(parent),
        block_size,
        _tier(fields),
        # Blocks that depend on more than tokens, adapter and salt have no name here, nor those of
        # an adapter that has only a number, as older publishers say it: requests have its name.
        () if salt is None or is_nameless else tuple(fields.get("token_ids") or ()),
        lora_name,
        fields.get("group_idx"),
        kind is None or kind in ("full_attention", "mla_attention"),
        salt or "",
        fields.get("namespace") or "",
    )


def _salt_in(extra_keys: Any, lora_name: str | None) -> str | None:
    """The cache salt among what blocks depend on beside their tokens, a list per block; None if
    they depend on anything else, such as an image."""
    salt = ""
    for block, extras in enumerate(extra_keys or ()):
        others = list(extras or ())
        if lora_name in others:
            others.remove(lora_name)  # a salt may be the same word
        if not others:
            continue
        if block or len(others) > 1 or not isinstance(others[0], str):
            return None
        salt = others[0]
    return salt


def _tier(fields: Mapping[str, Any]) -> Tier:
    return _TIERS.get(fields.get("medium"), Tier.DISK)


def _shown(value: Any) -> str:
    return repr(value)[:80]
