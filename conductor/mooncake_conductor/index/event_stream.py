"""The event stream of one publisher: applies its batches to the index in order, and repairs gaps.

A gap is repaired by a replay, else by a snapshot, else by clearing what the publisher holds.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol

from mooncake_conductor.index.holder_sets import Tier
from mooncake_conductor.index.kv_event_messages import (
    AllCleared,
    BlocksRemoved,
    BlocksStored,
    EventBatch,
    KVEvent,
)
from mooncake_conductor.index.published_blocks import PORTION_BLOCKS, PublishedBlocks

MAX_EARLY_BATCHES = 4096
"""Bound of the batches held back for a missing one; beyond it the stream starts afresh."""


class StreamState(Enum):
    """How far the index can rely on a stream."""

    HEALTHY = auto()
    """All events since the (fresh) start of the stream have been applied."""
    GAP = auto()
    """Events are missing and a replay is awaited. The index uses this slot only to break ties."""


@dataclass(frozen=True, slots=True)
class ReplayRequest:
    """The caller must request a replay from the publisher.

    Args:
        start: the sequence number before the first missing one. That batch is known: if the replay
            contains another batch with this number, the publisher has restarted.
    """

    start: int


@dataclass(frozen=True, slots=True)
class SnapshotRequest:
    """The caller must request a snapshot of everything that the publisher holds."""


PublisherRequest = ReplayRequest | SnapshotRequest


@dataclass(slots=True)
class StreamStats:
    """Counters of a stream."""

    num_applied: int = 0
    num_duplicates: int = 0
    num_outdated: int = 0
    num_gaps: int = 0
    num_restarts: int = 0
    num_resets: int = 0
    num_snapshots: int = 0
    num_skipped: int = 0


class ChunkHoldings(Protocol):
    """Receives what a publisher holds: the index, or one publisher's part of an instance."""

    def stored(self, slot: int, tier: Tier, keys: Iterable[int]) -> None:
        """Add chunks that it holds now."""

    def removed(self, slot: int, tier: Tier, keys: Iterable[int]) -> None:
        """Remove chunks that it no longer holds in a tier."""

    def cleared(self, slot: int) -> None:
        """Remove all its chunks."""

    def set_healthy(self, slot: int, is_healthy: bool) -> None:
        """Set whether its events have arrived without a gap."""


class EventStream:
    """Applies one publisher's batches to the index, each once and in order.

    Lost batches are replayed. If the publisher no longer has them, a snapshot of what it holds is
    requested. If it does not support that either, everything known about it is cleared: the index
    may then miss chunks, but it never claims chunks that are gone.

    A restart of the publisher (a new epoch) is detected by a batch, live or replayed, with a known
    sequence number but a later time. It is missed if exactly as many batches are lost as were known
    before, or if the publisher's clock was set back: who learns of a restart in another way begins
    a new stream.

    Args:
        index: receives what the publisher holds.
        slot: slot of the publishing instance.
        blocks: converts block hashes to chunk keys; None if the hashes are the index's own keys.
        supports_snapshots: the publisher may support snapshots, and one has been requested already.
        namespace: only blocks in this namespace belong to the instance; empty: all do.
        on_clear: called whenever everything known about the publisher is cleared.
    """

    def __init__(
        self,
        index: ChunkHoldings,
        slot: int,
        blocks: PublishedBlocks | None = None,
        *,
        supports_snapshots: bool = False,
        namespace: str = "",
        on_clear: Callable[[], None] = lambda: None,
    ) -> None:
        self.state = StreamState.HEALTHY
        self.stats = StreamStats()
        self._index = index
        self._slot = slot
        self._blocks = blocks
        if blocks is not None:
            blocks.placed = lambda tier, keys: index.stored(slot, tier, keys)
        self._namespace = namespace
        self._on_clear = on_clear
        self._expected = 0
        self._replay_start = -1
        self._num_requested = int(supports_snapshots)
        self._supports_snapshots = self._awaits_snapshot = supports_snapshots
        # Those of `_num_requested` sent in an earlier epoch. Their answers may bring batches
        # of that epoch after batches of the current one.
        self._num_outdated_requests = 0
        self._last_published = float("-inf")
        self._early: dict[int, EventBatch] = {}
        self._windowed: set[int] = set()
        self.has_ended = False

    @property
    def num_orphans(self) -> int:
        """Blocks that are left out because their parent is unknown; see ``PublishedBlocks``."""
        return 0 if self._blocks is None else self._blocks.num_orphans

    def end(self) -> None:
        """End the stream: drop orphans and the rest of a snapshot that is being applied."""
        self.has_ended = True
        if self._blocks is not None:
            self._blocks.clear()

    @property
    def expected(self) -> int:
        """The next sequence number."""
        return self._expected

    def receive(
        self, sequence: int, batch: EventBatch, is_replayed: bool = False
    ) -> PublisherRequest | None:
        """Process a batch, live or replayed. Each kind must be passed in the order of its sending.

        Returns:
            The request to send to the publisher, if any.
        """
        if self._is_outdated(sequence, batch, is_replayed):
            self.stats.num_outdated += 1
            return None
        if self._is_of_new_epoch(sequence, batch):
            self._restart()
            self._num_outdated_requests = 0 if is_replayed else self._num_requested
        elif sequence < self._expected:
            self.stats.num_duplicates += 1
            return None
        if sequence > self._expected:
            return self._hold_back(sequence, batch)
        self._apply(batch)
        self._apply_early()
        return None

    def replay_ended(self) -> PublisherRequest | None:
        """Process the end of a replay: the publisher has sent all batches that it still had.

        Returns:
            The next request, if batches are still missing: another replay if more were lost in the
            meantime, else a snapshot.
        """
        if self._is_answer_outdated() or not self._early or self._num_requested > 0:
            return None
        if self._expected > self._replay_start:
            return self._request_replay()
        if self._supports_snapshots:
            return self.request_snapshot()
        return self._skip_gap()

    def apply_snapshot(
        self, next_sequence: int, batches: Sequence[EventBatch]
    ) -> Generator[None, None, ReplayRequest | None]:
        """Apply a snapshot of the publisher.

        A million tokens take about a second, so it is applied in portions: the caller may run other
        work after each `yield`, but must not pass other batches of this publisher.

        Args:
            next_sequence: sequence number of the live batch that follows the snapshot.
            batches: what the publisher holds; empty if it does not support snapshots or has not
                answered.

        Returns:
            The next request to the publisher, if any.
        """
        self._awaits_snapshot = False
        if self._is_answer_outdated():
            return None
        published_at = batches[0].published_at if batches else 0.0
        if not batches or self._is_superseded(next_sequence, published_at):
            if self._expected > self._replay_start and (self._early or not batches):
                return self._request_replay()
            return self._skip_gap() if self._early else None
        self.stats.num_snapshots += 1
        self._reset(next_sequence)
        self._last_published = published_at
        num_blocks = 0
        for batch in batches:
            self.stats.num_skipped += batch.num_skipped
            for event in batch.events:
                num_blocks += self._apply_event(event)
                if num_blocks >= PORTION_BLOCKS:
                    yield
                    if self.has_ended:
                        return None
                    num_blocks = 0
        self._early = {
            at: batch
            for at, batch in self._early.items()
            if at >= next_sequence and batch.published_at >= published_at
        }
        self._apply_early()
        return self._request_replay() if self._early and not self._num_requested else None

    def request_snapshot(self) -> SnapshotRequest:
        """Register a snapshot request, which the caller must send to the publisher."""
        self._num_requested += 1
        self._awaits_snapshot = True
        return SnapshotRequest()

    def _request_replay(self) -> ReplayRequest:
        self._replay_start = self._expected
        self._num_requested += 1
        return ReplayRequest(max(self._expected - 1, 0))

    def _is_answer_outdated(self) -> bool:
        """Count an answer. Returns whether its request was sent in an earlier epoch."""
        self._num_requested -= 1
        if not self._num_outdated_requests:
            return False
        self._num_outdated_requests -= 1
        return True

    def _is_superseded(self, next_sequence: int, published_at: float) -> bool:
        """Whether a snapshot is older than what is known, or of an earlier epoch.

        Its time is that of the batch before ``next_sequence``. So, as with batches, a lower
        sequence number with a later time is from a new epoch.
        """
        if any(
            at < next_sequence and batch.published_at > published_at
            for at, batch in self._early.items()
        ):
            return True
        if next_sequence < self._expected:
            return published_at <= self._last_published
        return published_at < self._last_published

    def _skip_gap(self) -> ReplayRequest | None:
        """Give up the missing batches: clear what was known, and continue after them."""
        first = min(self._early)
        self._reset(first)
        # Nothing newer is left to compare with, and the publisher's clock may have been set back.
        self._last_published = self._early[first].published_at
        self._apply_early()
        return self._request_replay() if self._early else None

    def _is_of_new_epoch(self, sequence: int, batch: EventBatch) -> bool:
        """Whether a batch with a later sequence number was published earlier than this one."""
        if sequence < self._expected:
            return batch.published_at > self._last_published
        last = max(self._early, default=-1)
        return sequence <= last and batch.published_at > self._early[last].published_at

    def _is_outdated(self, sequence: int, batch: EventBatch, is_replayed: bool) -> bool:
        """Whether a batch is from an earlier epoch.

        That is so if its replay was requested then, or if the batch before it was published later.
        """
        is_next = sequence == self._expected
        return (is_replayed and bool(self._num_outdated_requests)) or (
            is_next and batch.published_at < self._last_published
        )

    def _hold_back(self, sequence: int, batch: EventBatch) -> ReplayRequest | None:
        is_new_gap = self.state is StreamState.HEALTHY
        self._early[sequence] = batch
        if len(self._early) > MAX_EARLY_BATCHES:
            return self._skip_gap()
        if not is_new_gap:
            return None
        self.stats.num_gaps += 1
        self._enter(StreamState.GAP)
        return None if self._awaits_snapshot else self._request_replay()

    def _apply_early(self) -> None:
        while (batch := self._early.pop(self._expected, None)) is not None:
            if batch.published_at < self._last_published:  # from an epoch that ended unnoticed
                self.stats.num_outdated += 1
                break
            self._apply(batch)
        self._enter(StreamState.GAP if self._early else StreamState.HEALTHY)

    def _restart(self) -> None:
        """Start a new epoch: the publisher has restarted and counts from 0 again."""
        self.stats.num_restarts += 1
        self._early.clear()
        self._reset(0)
        self._awaits_snapshot = False
        self._enter(StreamState.HEALTHY)  # so that a gap in this epoch requests a replay

    def _reset(self, expected: int) -> None:
        self.stats.num_resets += 1
        self._clear()
        self._expected = expected

    def _clear(self) -> None:
        self._index.cleared(self._slot)
        self._on_clear()
        if self._blocks is not None:
            self._blocks.clear()

    def _enter(self, state: StreamState) -> None:
        if state is not self.state:
            self.state = state
            self._index.set_healthy(self._slot, state is StreamState.HEALTHY)

    def _apply(self, batch: EventBatch) -> None:
        self._expected += 1
        self._last_published = max(self._last_published, batch.published_at)
        self.stats.num_applied += 1
        self.stats.num_skipped += batch.num_skipped
        for event in batch.events:
            self._apply_event(event)

    def _apply_event(self, event: KVEvent) -> int:
        """Apply an event. Returns its number of blocks."""
        match event:
            case BlocksStored():
                self._store(event)
                return len(event.keys)
            case BlocksRemoved(keys, tier, group):
                if group not in self._windowed:
                    gone = keys if self._blocks is None else self._blocks.removed(keys, tier)
                    self._index.removed(self._slot, tier, gone)
                return len(keys)
            case AllCleared():
                self._clear()
        return 0

    def _store(self, event: BlocksStored) -> None:
        """Apply stored blocks. Those of sliding-window layers are skipped: they form no prefix."""
        if self._namespace and event.namespace != self._namespace:
            self.stats.num_skipped += 1
            return
        if not event.is_full_attention:
            if event.group is not None:
                self._windowed.add(event.group)
            self.stats.num_skipped += 1
            return
        keys = event.keys if self._blocks is None else self._blocks.stored(event)
        self._index.stored(self._slot, event.tier, keys)
