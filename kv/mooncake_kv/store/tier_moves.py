"""Chunks on their way between a store's memory and its SSDs.

Everything here is called with the store's lock held, except where it says so. A chunk is loaded
once however many want it, and whoever waits does so for a bounded time. What nobody wants any more
is not read to its end.

A pin waits for all bytes of its chunks, or is granted while they come in. Then its user asks how
far they are, reads what is there, and learns from the handle's end whether all of it came.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

from msgspec import structs

from mooncake_kv.store.chunk_store import MAX_LEASE_S, Chunk, ReadHandle, Tier, WriteHandle
from mooncake_kv.store.chunk_table import ChunkTable
from mooncake_kv.store.ssd_drive import ChunkWrite
from mooncake_kv.store.ssd_reads import ChunkRead
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
    """A chunk that is being read into memory.

    Args:
        handle: on its memory.
        requests: pins that wait for all of it.
        num_bytes: how many of its leading bytes are there.
        is_dropped: nobody may find it when it has come.
    """

    handle: WriteHandle
    requests: list[PinRequest]
    num_bytes: int = 0
    is_dropped: bool = False


@dataclass(slots=True, eq=False)
class _Progress:
    """Somebody who waits for leading bytes of chunks that come in.

    Args:
        handles: on them.
        beyond: for more than so many of each.
        deadline: when it ends without them.
        future: how many there are; 0 if they don't come.
        num_seen: how many leading handles have them.
    """

    handles: Sequence[ReadHandle]
    beyond: int
    deadline: float
    future: Future[int]
    num_seen: int = 0


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
        self._progress: dict[bytes, list[_Progress]] = {}  # by the chunk that it waits for
        self.tier: SsdTier | None = None

    def has(self, key: bytes) -> bool:
        """Whether an SSD has it."""
        return self.tier is not None and self.tier.chunk(key) is not None

    def gives(self, key: bytes) -> bool:
        """Whether an SSD has it, and answers."""
        return self.has(key) and self._is_answered(key)

    def committed(self, keys: Iterable[bytes]) -> None:
        """Chunks were put into memory; those that had been there before are used a second time."""
        if self.tier is None:
            return
        for key in keys:
            entry = self._table.entry(key)
            if entry is not None and self.tier.note_put(key) and entry.num_uses:
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
        self,
        keys: Sequence[bytes],
        handles: list[ReadHandle | None],
        user: int,
        lease_s: float,
        first_bytes: int | None = None,
    ) -> tuple[Future[list[ReadHandle | None]], Callable[[], None]]:
        """Bring what a pin found no handle for from SSDs.

        Args:
            keys: of the pin.
            handles: found in memory; filled in.
            user: whose.
            lease_s: of each handle, counted from when all are there.
            first_bytes: see ``ChunkStore.pin``.

        Returns:
            What the caller waits for, and what is to be called once the lock is released.
        """
        missing: dict[bytes, list[int]] = {}
        for position, (key, handle) in enumerate(zip(keys, handles, strict=True)):
            if handle is None and (key in self._loads or self.has(key)) and self._is_answered(key):
                missing.setdefault(key, []).append(position)
        deadline = self._clock() + self._load_timeout_s
        request = PinRequest(user, lease_s, handles, missing, deadline, Future())
        request.future.set_running_or_notify_cancel()  # it has a result, whoever stops waiting
        begun = self._begin([key for key in missing if not self._join(key, request)], request)
        started = [self._read_of(key) for key in begun]
        if first_bytes is not None:
            self._grant_early(request)
        is_granted = not request.missing  # else whoever ends its last load grants it
        if not is_granted:
            self._requests.add(request)

        def begin() -> None:
            if started and self.tier is not None:
                self.tier.read(started, first_bytes)
            if is_granted:
                request.future.set_result(request.handles)

        return request.future, begin

    def await_bytes(self, handles: Sequence[ReadHandle], beyond: int) -> Future[int]:
        future: Future[int] = Future()
        future.set_running_or_notify_cancel()
        deadline = self._clock() + self._load_timeout_s
        for answer in self._go_on([_Progress(handles, beyond, deadline, future)]):
            answer()  # nobody has the future yet
        return future

    def drop(self, keys: Iterable[bytes]) -> None:
        """What is on its way from SSDs is not to be found when it has come."""
        for key in keys:
            if (load := self._loads.get(key)) is not None:
                load.is_dropped = True

    def time_out(self, now: float) -> list[Callable[[], None]]:
        """End what has waited long enough, or waits for a drive that hangs; returns what to call
        without the lock."""
        late: list[_Progress] = []
        for key, waiting in list(self._progress.items()):
            until = now if self._is_answered(key) else math.inf
            late += [each for each in waiting if each.deadline <= until]
            self._progress[key] = [each for each in waiting if each.deadline > until]
        answers = [partial(progress.future.set_result, 0) for progress in late]
        return answers + self._end(
            [
                request
                for request in self._requests
                if request.deadline <= now or not all(map(self._is_answered, request.missing))
            ]
        )

    def end_user(self, user: int) -> list[Callable[[], None]]:
        """End the pins of a user that is gone; returns what to call without the lock."""
        return self._end([request for request in self._requests if request.user == user])

    # -- inside ---------------------------------------------------------------------------------

    def _is_answered(self, key: bytes) -> bool:
        """Whether the SSD that has a chunk answers."""
        return self.tier is not None and self.tier.answers(key)

    def _end(self, requests: Sequence[PinRequest]) -> list[Callable[[], None]]:
        for request in requests:
            for load in self._loads.values():
                if request in load.requests:
                    load.requests.remove(request)
        return [self._finish(request) for request in requests]

    def _join(self, key: bytes, request: PinRequest) -> bool:
        """Wait for a load that runs; whether one does."""
        load = self._loads.get(key)
        if load is not None:
            load.requests.append(request)
        return load is not None

    def _begin(self, keys: Sequence[bytes], request: PinRequest) -> list[bytes]:
        """Begin loads that a request waits for; which ones there is memory for. It does not wait
        for the others."""
        found = [self.tier.chunk(key) for key in keys] if self.tier is not None else []
        chunks = [chunk for chunk in found if chunk is not None]
        now = self._clock()
        granted = self._table.reserve(chunks, SSD_USER, MAX_LEASE_S, now) if chunks else []
        begun = []
        for chunk, grant in zip(chunks, granted, strict=True):
            if isinstance(grant, WriteHandle):
                self._loads[chunk.key] = _Load(grant, [request])
                begun.append(chunk.key)
        for key in set(keys).difference(begun):
            del request.missing[key]
        return begun

    def _read_of(self, key: bytes) -> ChunkRead:
        """What a load that begins has the tier do."""
        load = self._loads[key]
        return ChunkRead(
            key,
            load.handle.offset,
            lambda: self._is_wanted(load),
            lambda num_bytes: self._arrived(load, num_bytes),
            lambda is_right: self._loaded(key, is_right),
        )

    def _grant_early(self, request: PinRequest) -> None:
        """Grant reads of what comes in."""
        for key in request.missing:
            self._loads[key].requests.remove(request)
        places = [(key, at) for key, positions in request.missing.items() for at in positions]
        keys = [key for key, _ in places]
        handles = self._table.pin(
            keys, request.user, request.lease_s, self._clock(), are_arriving=True
        )
        for (_, position), handle in zip(places, handles, strict=True):
            self._grant(request, position, handle)
        request.missing.clear()

    def _grant(self, request: PinRequest, position: int, handle: ReadHandle | None) -> None:
        if handle is not None:
            request.handles[position] = structs.replace(handle, tier=Tier.SSD)
            self._table.stats.num_ssd_hits += 1
            self._table.stats.num_misses -= 1

    def _is_wanted(self, load: _Load) -> bool:
        """On a thread of the tier: whether anybody waits for a load, or reads what comes in. One
        who comes right behind a no has a miss."""
        key = load.handle.key
        if load.requests or self._table.has_readers(key):
            return True
        with self._lock:  # in which a request becomes a reader
            return bool(load.requests) or self._table.has_readers(key)

    def _arrived(self, load: _Load, num_bytes: int) -> None:
        """On a thread of the tier: leading bytes of a chunk are there. The load may have ended by
        now, and the next one of the chunk may have begun: it has bytes of its own."""
        with self._lock:
            load.num_bytes = max(load.num_bytes, num_bytes)
            finished = self._wake(load.handle.key)
        for finish in finished:
            finish()

    def _loaded(self, key: bytes, is_right: bool) -> None:
        """On a thread of the tier: a read ended."""
        with self._lock:
            load = self._loads.pop(key)
            now, ids = self._clock(), [load.handle.handle_id]
            if is_right and not load.is_dropped:
                is_right = self._table.commit(ids, SSD_USER, now)[0]
            else:
                is_right = False
                self._table.abort(ids, SSD_USER, now)
            finished = [
                self._finish(request)
                for request in load.requests
                if self._settle(request, key, is_right, now)
            ]
            finished += self._wake(key)
        for finish in finished:
            finish()

    def _wake(self, key: bytes) -> list[Callable[[], None]]:
        """A chunk has more bytes, or ended; what to call without the lock."""
        return self._go_on(self._progress.pop(key, ()))

    def _go_on(self, waiting: Iterable[_Progress]) -> list[Callable[[], None]]:
        """Have each wait for the first of its chunks that has not enough bytes; what to call
        without the lock for those that have an answer."""
        answers: list[Callable[[], None]] = []
        for progress in waiting:
            key = self._first_behind(progress)
            if key is not None:
                self._progress.setdefault(key, []).append(progress)
            else:
                found = [self._num_bytes(handle) for handle in progress.handles]
                answers.append(partial(progress.future.set_result, min(found, default=0)))
        return answers

    def _first_behind(self, progress: _Progress) -> bytes | None:
        """The chunk that is to have more bytes; None if all have enough, or one won't."""
        while progress.num_seen < len(progress.handles):
            handle = progress.handles[progress.num_seen]
            if self._num_bytes(handle) <= min(progress.beyond, handle.nbytes - 1):
                return handle.key if self._comes(handle) else None
            progress.num_seen += 1
        return None

    def _comes(self, handle: ReadHandle) -> bool:
        """Whether a chunk comes into the memory that a handle is on."""
        load = self._loads.get(handle.key)
        return load is not None and load.handle.generation == handle.generation

    def _num_bytes(self, handle: ReadHandle) -> int:
        """How many leading bytes of a chunk are in the memory that a handle is on, and right."""
        if self._comes(handle):  # all of them count only once they are committed
            return min(self._loads[handle.key].num_bytes, handle.nbytes - 1)
        entry = self._table.entry(handle.key)
        is_there = entry is not None and entry.generation == handle.generation
        return handle.nbytes if is_there else 0

    def _settle(self, request: PinRequest, key: bytes, is_right: bool, now: float) -> bool:
        """Give a request what it waited for; whether that was the last."""
        for position in request.missing.pop(key):
            if is_right:
                (handle,) = self._table.pin([key], request.user, request.lease_s, now)
                self._grant(request, position, handle)
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
                    self._table.observer.stored(Tier.SSD, [chunk])

        self.tier.write(ChunkWrite(chunk, handle.offset, is_held, ended))
