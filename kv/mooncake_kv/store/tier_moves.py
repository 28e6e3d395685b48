"""Moves chunks between a store's memory and its SSDs: the part of ``NodeStore`` between the two.

All methods are called with the store's lock held, except where they say otherwise. Concurrent pins
of a chunk share one load, each pin has a timeout, and a load is cancelled once no pin waits for it.

A pin either waits for all bytes of its chunks or is granted at once (``first_bytes``). In the
second case its user asks with ``await_bytes`` how many bytes have arrived, reads those, and learns
from ``release`` whether all of them were valid.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from itertools import takewhile

from msgspec import structs

from mooncake_kv.store.chunk_handles import SSD_USER
from mooncake_kv.store.chunk_store import MAX_LEASE_S, Chunk, ReadHandle, Tier, WriteHandle
from mooncake_kv.store.chunk_table import ChunkTable
from mooncake_kv.store.ssd_drive import ChunkWrite
from mooncake_kv.store.ssd_reads import ChunkRead
from mooncake_kv.store.ssd_tier import SsdTier


@dataclass(slots=True, eq=False)
class PinRequest:
    """A pin that waits for chunks from SSDs.

    Args:
        user: the user of its handles.
        lease_s: lease of its handles in seconds.
        handles: the handles granted so far, by position.
        missing: the positions that wait for a load, by key.
        deadline: when the pin ends; chunks missing by then are misses.
        future: the caller's result.
    """

    user: int
    lease_s: float
    handles: list[ReadHandle | None]
    missing: dict[bytes, list[int]]
    deadline: float
    future: Future[list[ReadHandle | None]]


@dataclass(slots=True, eq=False)
class _Load:
    """A chunk that is being read from an SSD into memory.

    Args:
        handle: write handle of its memory.
        requests: pins that wait for the whole chunk.
        num_bytes: its leading bytes that have arrived.
        is_dropped: the chunk was dropped during the load, and must not be committed.
    """

    handle: WriteHandle
    requests: dict[PinRequest, None]
    num_bytes: int = 0
    is_dropped: bool = False


@dataclass(slots=True, eq=False)
class _Progress:
    """A call of ``await_bytes`` that waits for leading bytes of chunks.

    Args:
        handles: the chunks' read handles.
        beyond: waits until every chunk has more than this many bytes.
        deadline: when the call ends without them.
        future: the number of bytes that have arrived; 0 after a timeout.
        num_seen: leading handles that are known to have enough bytes.
    """

    handles: Sequence[ReadHandle]
    beyond: int
    deadline: float
    future: Future[int]
    num_seen: int = 0


class TierMoves:
    """Loads and writes between one table and one SSD tier.

    Args:
        table: the chunks in memory.
        lock: the store's lock; the callbacks on the tier's threads acquire it.
        clock: monotonic seconds.
        load_timeout_s: seconds that a pin waits for SSD reads.
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
        # Those that wait, in the order of their deadlines, since all have the same timeout. A call
        # of ``await_bytes`` is also noted at the chunk that it waits for.
        self._requests: dict[PinRequest, None] = {}
        self._calls: dict[_Progress, bytes] = {}
        self._progress: dict[bytes, dict[_Progress, None]] = {}
        self.tier: SsdTier | None = None

    def has(self, key: bytes) -> bool:
        """Whether an SSD has the chunk."""
        return self.tier is not None and self.tier.chunk(key) is not None

    def is_available(self, key: bytes) -> bool:
        """Whether an SSD has the chunk and is not hung."""
        return self.has(key) and self._is_drive_available(key)

    def committed(self, keys: Iterable[bytes]) -> None:
        """Chunks were put into memory. A chunk that had been put before is in its second use, and
        is written to an SSD."""
        if self.tier is None:
            return
        for key in keys:
            entry = self._table.entry(key)
            if entry is not None and self.tier.note_put(key) and entry.num_uses:
                self._write(entry.chunk)

    def touched(self, keys: Iterable[bytes]) -> None:
        """Chunks were used. Those still in memory from their put are in their second use, and are
        written to an SSD."""
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
        """Load those chunks of a pin from SSDs that are not in memory.

        Args:
            keys: the pin's keys.
            handles: the handles found in memory; missing ones are filled in.
            user: the user that pins.
            lease_s: lease of each handle, counted from when the pin is granted.
            first_bytes: see ``ChunkStore.pin``.

        Returns:
            The pin's result, and a callback that starts the load, to be called once the lock is
            released.
        """
        missing: dict[bytes, list[int]] = {}
        for position, (key, handle) in enumerate(zip(keys, handles, strict=True)):
            if (
                handle is None
                and (key in self._loads or self.has(key))
                and self._is_drive_available(key)
            ):
                missing.setdefault(key, []).append(position)
        deadline = self._clock() + self._load_timeout_s
        request = PinRequest(user, lease_s, handles, missing, deadline, Future())
        request.future.set_running_or_notify_cancel()  # a cancel of the caller has no effect
        begun = self._begin([key for key in missing if not self._join(key, request)], request)
        started = [self._read_of(key) for key in begun]
        if first_bytes is not None:
            self._grant_early(request)
        is_granted = not request.missing  # else the end of its last load grants it
        if is_granted:
            self._count_misses(request)
        else:
            self._requests[request] = None

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
        for answer in self._advance([_Progress(handles, beyond, deadline, future)]):
            answer()  # with the lock held: the future has no callbacks yet
        return future

    def drop(self, keys: Iterable[bytes]) -> None:
        """Have running loads of these chunks end without a commit."""
        for key in keys:
            if (load := self._loads.get(key)) is not None:
                load.is_dropped = True

    def time_out(self, now: float) -> list[Callable[[], None]]:
        """End pins and ``await_bytes`` calls that are past their deadline or wait for a hung drive.
        Returns callbacks, to be called without the lock."""
        hung = self._hung()
        calls = {call: None for key in hung for call in self._progress.get(key, ())}
        calls |= dict.fromkeys(takewhile(lambda call: call.deadline <= now, self._calls))
        for call in calls:
            self._leave_queue(call)
        requests = {each: None for key in hung for each in self._loads[key].requests}
        requests |= dict.fromkeys(takewhile(lambda each: each.deadline <= now, self._requests))
        answers = [partial(call.future.set_result, 0) for call in calls]
        return answers + self._end(list(requests))

    def end_user(self, user: int) -> list[Callable[[], None]]:
        """End the pins of a user that has ended. Returns callbacks, to be called without the
        lock."""
        return self._end([request for request in self._requests if request.user == user])

    # -- inside ---------------------------------------------------------------------------------

    def _is_drive_available(self, key: bytes) -> bool:
        """Whether the SSD that has a chunk is not hung."""
        return self.tier is not None and self.tier.is_available(key)

    def _hung(self) -> list[bytes]:
        """The chunks that are being loaded from a hung drive. Looks at each only if one hangs."""
        if self.tier is not None and not self.tier.has_hung_reads:
            return []
        return [key for key in self._loads if not self._is_drive_available(key)]

    def _leave_queue(self, call: _Progress) -> None:
        """Have a call of ``await_bytes`` wait for no chunk any more."""
        key = self._calls.pop(call)
        del self._progress[key][call]
        if not self._progress[key]:
            del self._progress[key]

    def _end(self, requests: Sequence[PinRequest]) -> list[Callable[[], None]]:
        for request in requests:
            for key in request.missing:
                del self._loads[key].requests[request]
        return [self._finish(request) for request in requests]

    def _join(self, key: bytes, request: PinRequest) -> bool:
        """Wait for the running load of a chunk; False if there is none."""
        load = self._loads.get(key)
        if load is not None:
            load.requests[request] = None
        return load is not None

    def _begin(self, keys: Sequence[bytes], request: PinRequest) -> list[bytes]:
        """Reserve memory for loads that a request waits for; returns the keys that got some. The
        request does not wait for the others, which are misses."""
        found = [self.tier.chunk(key) for key in keys] if self.tier is not None else []
        chunks = [chunk for chunk in found if chunk is not None]
        now = self._clock()
        granted = self._table.reserve(chunks, SSD_USER, MAX_LEASE_S, now) if chunks else []
        begun = []
        for chunk, grant in zip(chunks, granted, strict=True):
            if isinstance(grant, WriteHandle):
                self._loads[chunk.key] = _Load(grant, {request: None})
                begun.append(chunk.key)
        for key in set(keys).difference(begun):
            del request.missing[key]
        return begun

    def _read_of(self, key: bytes) -> ChunkRead:
        """Create the tier's read request of a new load."""
        load = self._loads[key]
        return ChunkRead(
            key,
            load.handle.offset,
            lambda: self._is_wanted(load),
            lambda num_bytes: self._arrived(load, num_bytes),
            lambda is_intact: self._loaded(key, is_intact),
        )

    def _grant_early(self, request: PinRequest) -> None:
        """Grant reads of chunks that are still being loaded."""
        for key in request.missing:
            del self._loads[key].requests[request]
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

    def _count_misses(self, request: PinRequest) -> None:
        """Count what a pin that is granted now has not got."""
        self._table.stats.num_misses += request.handles.count(None)

    def _is_wanted(self, load: _Load) -> bool:
        """Whether a pin waits for a load or reads its chunk; called on a thread of the tier without
        the lock. A pin that comes right after a False is a miss."""
        key = load.handle.key
        if load.requests or self._table.has_readers(key):
            return True
        with self._lock:  # a request becomes a reader under the lock: check both again
            return bool(load.requests) or self._table.has_readers(key)

    def _arrived(self, load: _Load, num_bytes: int) -> None:
        """Leading bytes of a chunk have arrived; called on a thread of the tier without the lock.
        The load may have ended by now and another load of the chunk may run, which counts its own
        bytes."""
        with self._lock:
            load.num_bytes = max(load.num_bytes, num_bytes)
            finished = self._wake(load.handle.key)
        for finish in finished:
            finish()

    def _loaded(self, key: bytes, is_intact: bool) -> None:
        """A load has ended; called on a thread of the tier without the lock."""
        with self._lock:
            load = self._loads.pop(key)
            now, ids = self._clock(), [load.handle.handle_id]
            if is_intact and not load.is_dropped:
                is_intact = self._table.commit(ids, SSD_USER, now)[0]
            else:
                is_intact = False
                self._table.abort(ids, SSD_USER, now)
            finished = [
                self._finish(request)
                for request in load.requests
                if self._grant_loaded(request, key, is_intact, now)
            ]
            finished += self._wake(key)
        for finish in finished:
            finish()

    def _wake(self, key: bytes) -> list[Callable[[], None]]:
        """A load has made progress or ended: check the calls that wait for it. Returns callbacks,
        to be called without the lock."""
        return self._advance(self._progress.pop(key, ()))

    def _advance(self, waiting: Iterable[_Progress]) -> list[Callable[[], None]]:
        """Queue each call at the first of its chunks that has too few bytes. Returns callbacks that
        resolve the calls that need not wait, to be called without the lock."""
        answers: list[Callable[[], None]] = []
        for progress in waiting:
            key = self._first_incomplete(progress)
            if key is not None:
                self._calls[progress] = key
                self._progress.setdefault(key, {})[progress] = None
            else:
                self._calls.pop(progress, None)
                found = [self._num_bytes(handle) for handle in progress.handles]
                answers.append(partial(progress.future.set_result, min(found, default=0)))
        return answers

    def _first_incomplete(self, progress: _Progress) -> bytes | None:
        """The first chunk to wait for; None if all have enough bytes, or one will not get them."""
        while progress.num_seen < len(progress.handles):
            handle = progress.handles[progress.num_seen]
            if self._num_bytes(handle) <= min(progress.beyond, handle.nbytes - 1):
                return handle.key if self._is_loading(handle) else None
            progress.num_seen += 1
        return None

    def _is_loading(self, handle: ReadHandle) -> bool:
        """Whether a load into the memory of this handle is running."""
        load = self._loads.get(handle.key)
        return load is not None and load.handle.generation == handle.generation

    def _num_bytes(self, handle: ReadHandle) -> int:
        """The leading bytes of a chunk that are in the handle's memory, and verified."""
        if self._is_loading(handle):  # the last byte counts only once the load is committed
            return min(self._loads[handle.key].num_bytes, handle.nbytes - 1)
        entry = self._table.entry(handle.key)
        is_there = entry is not None and entry.generation == handle.generation
        return handle.nbytes if is_there else 0

    def _grant_loaded(self, request: PinRequest, key: bytes, is_intact: bool, now: float) -> bool:
        """Grant a request the chunk it waited for; returns whether it was the last one."""
        for position in request.missing.pop(key):
            if is_intact:
                (handle,) = self._table.pin([key], request.user, request.lease_s, now)
                self._grant(request, position, handle)
        return not request.missing

    def _finish(self, request: PinRequest) -> Callable[[], None]:
        self._requests.pop(request, None)
        self._count_misses(request)
        ids = [handle.handle_id for handle in request.handles if handle is not None]
        self._table.extend(ids, request.user, request.lease_s, self._clock())
        return lambda: request.future.set_result(request.handles)

    def _write(self, chunk: Chunk) -> None:
        """Queue the write of a chunk that is in memory to an SSD, if the tier admits it."""
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
                # if it was dropped or collected in between, ``removed`` has been reported
                if is_stored and self.has(chunk.key):
                    self._table.observer.stored(Tier.SSD, [chunk])

        self.tier.write(ChunkWrite(chunk, handle.offset, is_held, ended))
