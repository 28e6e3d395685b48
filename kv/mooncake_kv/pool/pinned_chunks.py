"""The pinned chunks of one load: their read handles, and how much of them has arrived from SSDs.
Used by ``PoolClient``."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import count

from mooncake_kv.pool.pool_events import LoadRequest
from mooncake_kv.store.chunk_store import ChunkStore, ReadHandle, Tier


@dataclass(frozen=True, slots=True)
class PinnedChunks:
    """The chunks of one load that stores have pinned.

    Args:
        stores: the stores by number.
        handles: by position in the sequence, the store's number and the read handle.
    """

    stores: Mapping[int, ChunkStore]
    handles: Mapping[int, tuple[int, ReadHandle]]

    @property
    def are_arriving(self) -> bool:
        """Whether some chunks are still being read from SSDs into their store's memory."""
        return any(handle.tier is Tier.SSD for _, handle in self.handles.values())

    async def watch_arrivals(self, nbytes: int, arrived: Callable[[int], None]) -> bool:
        """Follow the arrival of chunks from SSDs until all have arrived.

        Args:
            nbytes: size of a chunk.
            arrived: called with the number of leading bytes of every chunk that are in memory,
                whenever that grows.

        Returns:
            False if some bytes will not arrive.
        """
        numbers = {n for n, handle in self.handles.values() if handle.tier is Tier.SSD}
        there = dict.fromkeys(numbers, 0)

        async def watch(number: int) -> bool:
            store = self.stores[number]
            handles = [h for n, h in self.handles.values() if n == number and h.tier is Tier.SSD]
            while there[number] < nbytes:
                found = await asyncio.wrap_future(store.await_bytes(handles, there[number]))
                if found <= there[number]:
                    return False
                there[number] = found
                arrived(min(there.values()))
            return True

        return all(await asyncio.gather(*map(watch, numbers)))

    async def release(self) -> bool:
        """Release all handles; returns whether all of them were in force until now."""
        by_store: dict[int, list[ReadHandle]] = {}
        for number, handle in self.handles.values():
            by_store.setdefault(number, []).append(handle)
        futures = [self.stores[number].release(handles) for number, handles in by_store.items()]
        answers = [await asyncio.wrap_future(future) for future in futures]
        return all(is_valid for answer in answers for is_valid in answer)


async def pin_chunks(
    load: LoadRequest,
    find_store: Callable[[int], ChunkStore | None],
    lease_s: float,
    first_bytes: int,
) -> PinnedChunks:
    """Pin the leading chunks of a load, up to the first one that is missing.

    Args:
        load: the load.
        find_store: returns the store with a number; None if it was disconnected.
        lease_s: lease of the handles in seconds.
        first_bytes: for chunks on SSDs, read this many bytes of each first, and don't wait for
            them; see ``ChunkStore.pin``.
    """
    wanted: dict[int, list[int]] = {}
    for position in range(load.first_chunk, len(load.keys)):
        wanted.setdefault(load.sources[position].store, []).append(position)
    stores = {n: store for n in wanted if (store := find_store(n)) is not None}
    asked: dict[int, Future[list[ReadHandle | None]]] = {}
    for number, store in stores.items():
        keys = [load.keys[position] for position in wanted[number]]
        asked[number] = store.pin(keys, lease_s=lease_s, first_bytes=first_bytes)
    handles: dict[int, tuple[int, ReadHandle]] = {}
    for number, future in asked.items():
        granted: list[ReadHandle | None] = await asyncio.wrap_future(future)
        for position, handle in zip(wanted[number], granted, strict=True):
            if handle is not None:
                handles[position] = (number, handle)
    stop = next(p for p in count(load.first_chunk) if p not in handles)
    behind = {p: handles.pop(p) for p in list(handles) if p > stop}
    await PinnedChunks(stores, behind).release()  # useless without the missing one before them
    return PinnedChunks(stores, handles)
