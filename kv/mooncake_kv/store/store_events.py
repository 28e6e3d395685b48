"""What a node store's tiers hold, as KV events: a block is a chunk, its hash the key's low bits."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from mooncake_kv.errors import KVConfigError
from mooncake_kv.kv_events import (
    MEDIUM_CPU,
    MEDIUM_DISK,
    BlockRemoved,
    BlockStored,
    KVEvent,
    event_key,
)
from mooncake_kv.store.chunk_store import Chunk, Tier

logger = logging.getLogger(__name__)

_MEDIUMS = {Tier.DRAM: MEDIUM_CPU, Tier.SSD: MEDIUM_DISK}


class StoreEventLog:
    """A ``StoreObserver`` that publishes what it is told. A publisher that has died costs its
    readers the store's events, and the store nothing.

    Args:
        publish: takes a batch of events; raises KVConfigError once it can't any more.
    """

    def __init__(self, publish: Callable[[list[KVEvent]], None]) -> None:
        self._publish = publish
        self._is_dead = False

    def stored(self, tier: Tier, chunks: Sequence[Chunk]) -> None:
        self._send([_stored(run, _MEDIUMS[tier]) for run in _runs(chunks)])

    def removed(self, tier: Tier, keys: Sequence[bytes]) -> None:
        if keys:
            self._send([BlockRemoved([event_key(key) for key in keys], _MEDIUMS[tier])])

    def _send(self, events: list[KVEvent]) -> None:
        if self._is_dead or not events:
            return
        try:
            self._publish(events)
        except KVConfigError as exc:
            self._is_dead = True
            logger.warning("this store's KV events end here: %s", exc)


def _runs(chunks: Sequence[Chunk]) -> Iterator[list[Chunk]]:
    """Chunks that follow one another in a prompt."""
    run: list[Chunk] = []
    for chunk in chunks:
        if run and not _is_next(run[-1], chunk):
            yield run
            run = []
        run.append(chunk)
    if run:
        yield run


def _is_next(before: Chunk, chunk: Chunk) -> bool:
    return (
        chunk.parent == before.key
        and chunk.num_tokens == before.num_tokens
        and (chunk.content is None) == (before.content is None)
    )


def _stored(run: Sequence[Chunk], medium: str) -> BlockStored:
    first = run[0]
    contents = [chunk.content for chunk in run if chunk.content is not None]
    token_ids = np.frombuffer(b"".join(each.token_ids for each in contents), "<u4").tolist()
    salts: list[list[str] | None] | None = None
    if first.tenant and first.parent is None:
        salts = [[first.tenant], *[None] * (len(run) - 1)]
    return BlockStored(
        [event_key(chunk.key) for chunk in run],
        None if first.parent is None else event_key(first.parent),
        token_ids,
        first.num_tokens,
        None,
        medium,
        None,
        salts,
        contents[0].namespace.hex() if contents else None,
    )
