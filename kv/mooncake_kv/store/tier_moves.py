"""Chunks on their way between a store's memory and its SSDs.

Everything here is called with the store's lock held, except where it says so. A chunk is loaded
once however many want it, and whoever waits does so for a bounded time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from msgspec import structs

from mooncake_kv.store.chunk_store import MAX_LEASE_S, Chunk, ReadHandle, Tier, WriteHandle
from mooncake_kv.store.chunk_table import ChunkTable
from mooncake_kv.store.ssd_tier import SsdTier

SSD_USER = 0
"""Whose handles those of the SSD tier are; users of a store count from 1."""


@dataclass(slots=True, eq=False)
class PinRequest:
    """A pin that waits for chunks from SSDs.

    Args:
        user, lease_s: of its handles.
        handles: what it has so far.
        missing: which it waits for, by key: their positions.
        deadline: when it ends without them.
        future: what its caller holds.
    """

    user: int
    lease_s: float
    handles: list[ReadHandle | None]
    missing: dict[bytes, list[int]]
    deadline: float
    future: Future[list[ReadHandle | None]]


@dataclass(slots=True, eq=False)
class _Load:
    """A chunk that is being read into memory, and who waits for it."""

    handle: WriteHandle
    requests: list[PinRequest]


class TierMoves:
    """Loads and writes between one table and one SSD tier.

    Args:
        table: of what is in memory.
        lock: of the store; taken on the tier's threads.
        clock: seconds.
        load_timeout_s: how long a pin waits for SSDs.
    """

    def __init__(
        self,
        table: ChunkTable,
        lock: threading.Lock,
        clock: Callable[[], float],
        load_timeout_s: float,
    ) -> None:
        self._table = table
        self._lock = lock
        self._clock = clock
        self._load_timeout_s = load_timeout_s
        self._loads: dict[bytes, _Load] = {}
        self._requests: set[PinRequest] = set()
        self.tier: SsdTier | None = None

    def has(self, key: bytes) -> bool:
        """Whether an SSD has it."""
        return self.tier is not None and self.tier.chunk(key) is not None

    def committed(self, keys: Iterable[bytes]) -> None:
        """Chunks were put into memory; those that had been there before are used a second time."""
        if self.tier is None:
            return
        for key in keys:
            entry = self._table.entry(key)
            if entry is not None and self.tier.note_put(key):
                self._write(entry.chunk)

    def touched(self, keys: Iterable[bytes]) -> None:
        """Chunks were used; those in memory since their put are used a second time."""
        if self.tier is None:
            return
        for key in keys:
            entry = self._table.entry(key)
            if entry is not None and entry.num_uses > 1:
                self._write(entry.chunk)

    def load(
        self, keys: Sequence[bytes], handles: list[ReadHandle | None], user: int, lease_s: float
    ) -> tuple[Future[list[ReadHandle | None]], Callable[[], None]]:
        """Bring what a pin found no handle for from SSDs.

        Args:
            keys: of the pin.
            handles: found in memory; filled in.
            user: whose.
            lease_s: of each handle, counted from when all are there.

        Returns:
            What the caller waits for, and what is to be called once the lock is released.
        """
        missing: dict[bytes, list[int]] = {}
        for position, (key, handle) in enumerate(zip(keys, handles, strict=True)):
            if handle is None and (key in self._loads or self.has(key)):
                missing.setdefault(key, []).append(position)
        deadline = self._clock() + self._load_timeout_s
        request = PinRequest(user, lease_s, handles, missing, deadline, Future())
        request.future.set_running_or_notify_cancel()  # it has a result, whoever stops waiting
        begun = [key for key in list(missing) if not self._join(key, request)]
        started = [(key, self._loads[key].handle.offset) for key in begun if key in self._loads]
        if request.missing:
            self._requests.add(request)

        def begin() -> None:
            for key, offset in started:
                self._start(key, offset)
            if not request.missing and not request.future.done():
                request.future.set_result(request.handles)

        return request.future, begin

    def time_out(self, now: float) -> list[Callable[[], None]]:
        """End the pins that have waited long enough; returns what to call without the lock."""
        return self._end([request for request in self._requests if request.deadline <= now])

    def end_user(self, user: int) -> list[Callable[[], None]]:
        """End the pins of a user that is gone; returns what to call without the lock."""
        return self._end([request for request in self._requests if request.user == user])

    # -- inside ---------------------------------------------------------------------------------

    def _end(self, requests: Sequence[PinRequest]) -> list[Callable[[], None]]:
        for request in requests:
            for load in self._loads.values():
                if request in load.requests:
                    load.requests.remove(request)
        return [self._finish(request) for request in requests]

    def _join(self, key: bytes, request: PinRequest) -> bool:
        """Wait for a load that runs; False if there is none and one was begun, or can't be."""
        load = self._loads.get(key)
        if load is not None:
            load.requests.append(request)
            return True
        chunk = self.tier.chunk(key) if self.tier is not None else None
        granted = None
        if chunk is not None:
            now = self._clock()
            (granted,) = self._table.reserve([chunk], SSD_USER, MAX_LEASE_S, now)
        if isinstance(granted, WriteHandle):
            self._loads[key] = _Load(granted, [request])
        else:
            del request.missing[key]
        return False

    def _start(self, key: bytes, offset: int) -> None:
        """Without the lock: have the tier read."""
        assert self.tier is not None
        self.tier.read(key, offset, lambda is_right: self._loaded(key, is_right))

    def _loaded(self, key: bytes, is_right: bool) -> None:
        """On a thread of the tier: a read ended."""
        with self._lock:
            load = self._loads.pop(key)
            now, ids = self._clock(), [load.handle.handle_id]
            if is_right:
                is_right = self._table.commit(ids, SSD_USER, now)[0]
            else:
                self._table.abort(ids, SSD_USER, now)
            finished = [
                self._finish(request)
                for request in load.requests
                if self._settle(request, key, is_right, now)
            ]
        for finish in finished:
            finish()

    def _settle(self, request: PinRequest, key: bytes, is_right: bool, now: float) -> bool:
        """Give a request what it waited for; whether that was the last."""
        for position in request.missing.pop(key):
            if is_right:
                (handle,) = self._table.pin([key], request.user, request.lease_s, now)
                if handle is not None:
                    request.handles[position] = structs.replace(handle, tier=Tier.SSD)
                    self._table.stats.num_ssd_hits += 1
                    self._table.stats.num_misses -= 1
        return not request.missing

    def _finish(self, request: PinRequest) -> Callable[[], None]:
        self._requests.discard(request)
        ids = [handle.handle_id for handle in request.handles if handle is not None]
        self._table.extend(ids, request.user, request.lease_s, self._clock())
        return lambda: request.future.set_result(request.handles)

    def _write(self, chunk: Chunk) -> None:
        """Have an SSD take a chunk that is in memory."""
        assert self.tier is not None
        if not self.tier.admit(chunk):
            return
        (handle,) = self._table.pin([chunk.key], SSD_USER, MAX_LEASE_S, self._clock())
        if handle is None:
            self.tier.withdraw(chunk)
            return

        def is_held() -> bool:
            with self._lock:
                return self._table.is_held(handle.handle_id, SSD_USER, self._clock())

        def ended(is_stored: bool) -> None:
            with self._lock:
                self._table.release([handle.handle_id], SSD_USER, self._clock())
                # dropped or collected in between, it was said to be gone before
                if is_stored and self.has(chunk.key):
                    self._table.observer.stored(Tier.SSD, chunk)

        self.tier.write(chunk, handle.offset, is_held, ended)
