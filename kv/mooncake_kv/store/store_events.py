"""KV events of a node store: reports which chunks its tiers gain and lose.

In these events a block is a chunk, and its hash is the low bits of the chunk key. A store in its
own process publishes them with ``StoreEventLog``; a store inside an engine buffers them with
``StoreEventBuffer``, and the engine publishes them with its own events.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from mooncake_kv.errors import KVConfigError
from mooncake_kv.kv_events import (
    MEDIUM_CPU,
    MEDIUM_STORAGE,
    BlockRemoved,
    BlockStored,
    KVEvent,
    event_key,
)
from mooncake_kv.store.chunk_store import Chunk, Tier

logger = logging.getLogger(__name__)

_MEDIUMS = {Tier.DRAM: MEDIUM_CPU, Tier.SSD: MEDIUM_STORAGE}


class StoreEventLog:
    """A ``StoreObserver`` that publishes every change. If the publisher dies, the events stop, and
    the store continues to serve.

    Args:
        publish: publishes a batch of events; raises KVConfigError once the publisher has died.
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
            logger.warning("this store publishes no more KV events: %s", exc)


class StoreEventBuffer:
    """A ``StoreObserver`` that buffers events until ``take``, for an engine that publishes them
    with its own. A chunk that is stored and removed between two calls causes no event, so the
    buffer is bounded by the size of the store.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._published: dict[tuple[Tier, bytes], Chunk] = {}
        # Unpublished changes, in order: the chunk if the tier has it now, None if it was removed.
        self._pending: dict[tuple[Tier, bytes], Chunk | None] = {}

    def stored(self, tier: Tier, chunks: Sequence[Chunk]) -> None:
        with self._lock:
            for chunk in chunks:
                self._pending.pop((tier, chunk.key), None)
                self._pending[tier, chunk.key] = chunk

    def removed(self, tier: Tier, keys: Sequence[bytes]) -> None:
        with self._lock:
            for key in keys:
                self._pending.pop((tier, key), None)
                if (tier, key) in self._published:
                    self._pending[tier, key] = None

    def publish_again(self) -> None:
        """Publish all chunks again, since an event of the engine has cleared its readers' state."""
        with self._lock:
            here = self._published | self._pending
            self._pending = {name: chunk for name, chunk in here.items() if chunk is not None}
            self._published = {}

    def take(self, namespace: bytes) -> list[KVEvent]:
        """Take the events since the last call: removed blocks first, then stored ones.

        Args:
            namespace: namespace of the KV that the engine can load; events of others are left out.
        """
        if not self._pending:  # the common case: called on every step
            return []
        with self._lock:
            pending = {
                name: chunk
                for name, chunk in self._pending.items()
                if chunk is None or chunk.content is None or chunk.content.namespace == namespace
            }
            self._pending = {}
            gone = [name for name, chunk in pending.items() if chunk is None]
            self._published.update((name, c) for name, c in pending.items() if c is not None)
            for name in gone:
                del self._published[name]
        events: list[KVEvent] = []
        for tier, medium in _MEDIUMS.items():
            if keys := [event_key(key) for where, key in gone if where is tier]:
                events.append(BlockRemoved(keys, medium))
            chunks = [c for (where, _), c in pending.items() if where is tier and c is not None]
            events += [_stored(run, medium) for run in _runs(chunks)]
        return events


def _runs(chunks: Sequence[Chunk]) -> Iterator[list[Chunk]]:
    """Split chunks into runs that follow one another in a prompt."""
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
