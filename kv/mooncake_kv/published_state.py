"""The state that a publisher of KV events has announced, for snapshots to new subscribers. Pure."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from mooncake_kv.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent

MAX_EVENT_BLOCKS = 512
"""Maximum number of blocks in one event of a snapshot."""


class _Kind(NamedTuple):
    """Properties that the blocks of one event share; fields as in ``BlockStored``."""

    block_size: int
    lora_id: int | None
    lora_name: str | None
    namespace: str | None


@dataclass(slots=True)
class _Block:
    """One block; fields as in ``BlockStored``, except that ``mediums`` has all media that hold
    it."""

    kind: _Kind
    parent: int | None
    token_ids: array[int]
    extra_keys: list[str] | None
    mediums: tuple[str | None, ...]


class PublishedState:
    """The blocks that are held, according to the events published so far."""

    def __init__(self) -> None:
        self._blocks: dict[int, _Block] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def apply(self, events: Iterable[KVEvent]) -> None:
        """Apply published events."""
        for event in events:
            match event:
                case BlockStored():
                    self._store(event)
                case BlockRemoved():
                    self._remove(event)
                case AllBlocksCleared():
                    self._blocks.clear()

    def snapshot(self) -> Iterator[KVEvent]:
        """Events that describe the whole state: each block after its parent, in its first medium;
        then, without tokens, the blocks in their other media."""
        yield AllBlocksCleared()
        other_media: dict[tuple[_Kind, str | None], list[int]] = {}
        for hashes in self._runs():
            first = self._blocks[hashes[0]]
            blocks = [self._blocks[each] for each in hashes]
            token_ids = [token_id for block in blocks for token_id in block.token_ids]
            extra_keys = [block.extra_keys for block in blocks]
            has_extra_keys = any(keys is not None for keys in extra_keys)
            yield _stored(
                first.kind,
                hashes,
                first.mediums[0],
                first.parent,
                token_ids,
                extra_keys if has_extra_keys else None,
            )
            for each, block in zip(hashes, blocks, strict=True):
                for medium in block.mediums[1:]:
                    other_media.setdefault((block.kind, medium), []).append(each)
        for (kind, medium), hashes in other_media.items():
            for at in range(0, len(hashes), MAX_EVENT_BLOCKS):
                yield _stored(kind, hashes[at : at + MAX_EVENT_BLOCKS], medium)

    def _store(self, event: BlockStored) -> None:
        kind = _Kind(event.block_size, event.lora_id, event.lora_name, event.namespace)
        parent = event.parent_block_hash
        for index, block_hash in enumerate(event.block_hashes):
            block = self._blocks.get(block_hash)
            if block is None or (event.token_ids and not block.token_ids):
                start = index * kind.block_size
                block = self._blocks[block_hash] = _Block(
                    kind,
                    parent,
                    array("I", event.token_ids[start : start + kind.block_size]),
                    None if event.extra_keys is None else event.extra_keys[index],
                    () if block is None else block.mediums,
                )
            if event.medium not in block.mediums:
                block.mediums += (event.medium,)
            parent = block_hash

    def _remove(self, event: BlockRemoved) -> None:
        for block_hash in event.block_hashes:
            block = self._blocks.get(block_hash)
            if block is None:
                continue
            block.mediums = tuple(each for each in block.mediums if each != event.medium)
            if not block.mediums:
                del self._blocks[block_hash]

    def _runs(self) -> Iterator[list[int]]:
        """All blocks, parents first, in runs that fit into one event each."""
        run: list[int] = []
        for block_hash in self._parents_first():
            if run and (len(run) == MAX_EVENT_BLOCKS or not self._follows(run[-1], block_hash)):
                yield run
                run = []
            run.append(block_hash)
        if run:
            yield run

    def _follows(self, before: int, block_hash: int) -> bool:
        first, second = self._blocks[before], self._blocks[block_hash]
        return (
            second.parent == before
            and second.kind == first.kind
            and second.mediums[0] == first.mediums[0]
            and bool(second.token_ids) == bool(first.token_ids)
        )

    def _parents_first(self) -> Iterator[int]:
        seen: set[int] = set()
        for block_hash in self._blocks:
            line: list[int] = []
            at: int | None = block_hash
            while at is not None and at not in seen and at in self._blocks:
                seen.add(at)
                line.append(at)
                at = self._blocks[at].parent
            yield from reversed(line)


def _stored(
    kind: _Kind,
    hashes: list[int],
    medium: str | None,
    parent: int | None = None,
    token_ids: list[int] | None = None,
    extra_keys: list[list[str] | None] | None = None,
) -> BlockStored:
    return BlockStored(
        hashes,
        parent,
        token_ids or [],
        kind.block_size,
        kind.lora_id,
        medium,
        kind.lora_name,
        extra_keys,
        kind.namespace,
    )
