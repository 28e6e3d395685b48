"""Events of one publisher, brought into order; gaps heal by a replay, else by a snapshot, else by
starting afresh."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
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
"""Batches that wait for a missing one. Beyond that the stream starts afresh."""


class StreamState(Enum):
    """How far an index can rely on a stream."""

    HEALTHY = auto()
    """Every event since the stream began, or began afresh, has been applied."""
    GAP = auto()
    """Events are missing and a replay is awaited: the index breaks ties only."""


@dataclass(frozen=True, slots=True)
class ReplayRequest:
    """What the caller has to ask the publisher for.

    Args:
        start: the sequence number before the first one that is missing. That batch is known; if the
            publisher now has another one there, it has begun to count anew since.
    """

    start: int


@dataclass(frozen=True, slots=True)
class SnapshotRequest:
    """The caller has to ask the publisher for all that it holds."""


Question = ReplayRequest | SnapshotRequest


@dataclass(slots=True)
class StreamStats:
    """What happened to a stream so far."""

    num_applied: int = 0
    num_duplicates: int = 0
    num_outdated: int = 0
    num_gaps: int = 0
    num_restarts: int = 0
    num_fresh_starts: int = 0
    num_snapshots: int = 0
    num_skipped: int = 0


class ChunkHoldings(Protocol):
    """Where a stream says what its publisher holds: the index, or an instance's part of it."""

    def stored(self, slot: int, tier: Tier, keys: Iterable[int]) -> None:
        """It holds these chunks now."""

    def removed(self, slot: int, tier: Tier, keys: Iterable[int]) -> None:
        """It no longer holds these chunks in that tier."""

    def cleared(self, slot: int) -> None:
        """It holds nothing any more."""

    def set_healthy(self, slot: int, is_healthy: bool) -> None:
        """Whether its events have arrived without a gap."""

    def digest(self, slot: int, tier: Tier) -> tuple[int, int]:
        """``(number of chunks, XOR of their keys)`` that it holds."""


class EventStream:
    """Applies one publisher's batches to the index, each once and in order.

    Lost batches are asked for again. If the publisher no longer has them, it is asked for all that
    it holds. If it can't say that either, what it was believed to hold is forgotten: afterwards the
    index may miss chunks, but it claims none that are gone. That a publisher counts anew shows by a
    number that was there before, with a later time, live or replayed. Only if exactly as many
    batches as were known are lost at once, nothing shows it.

    Args:
        index: to apply them to.
        slot: of the instance that publishes.
        blocks: turns its hashes into keys; None if these are the index's own.
        asks_snapshots: the publisher may be able to say what it holds, and has been asked now.
        namespace: blocks of any other are not the instance's; empty: all are.
    """

    def __init__(
        self,
        index: ChunkHoldings,
        slot: int,
        blocks: PublishedBlocks | None = None,
        *,
        asks_snapshots: bool = False,
        namespace: str = "",
    ) -> None:
        self.state = StreamState.HEALTHY
        self.stats = StreamStats()
        self._index = index
        self._slot = slot
        self._blocks = blocks
        if blocks is not None:
            blocks.placed = lambda tier, keys: index.stored(slot, tier, keys)
        self._namespace = namespace
        self._expected = 0
        self._asked_from = -1
        self._num_asked = int(asks_snapshots)
        self._asks_snapshots = self._awaits_snapshot = asks_snapshots
        # Of these: asked of an epoch that has ended. Its batches may come after those of the next.
        self._num_asked_before = 0
        self._last_published = float("-inf")
        self._early: dict[int, EventBatch] = {}
        self._windowed: set[int] = set()
        self.has_ended = False

    @property
    def num_orphans(self) -> int:
        """What is left out, as what comes before it is not known; see ``PublishedBlocks``."""
        return 0 if self._blocks is None else self._blocks.num_orphans

    def end(self) -> None:
        """Nobody follows it any more: what waits to be placed is nothing to the index, nor is what
        is left of a snapshot."""
        self.has_ended = True
        if self._blocks is not None:
            self._blocks.clear()

    @property
    def expected(self) -> int:
        """The sequence number that comes next."""
        return self._expected

    def receive(
        self, sequence: int, batch: EventBatch, is_replayed: bool = False
    ) -> Question | None:
        """Take a batch, live or replayed; returns what to ask the publisher for, if anything. Each
        of the two kinds has to come in the order in which it was sent."""
        if self._is_outdated(sequence, batch, is_replayed):
            self.stats.num_outdated += 1
            return None
        if self._shows_a_new_epoch(sequence, batch):
            self._restart()
            self._num_asked_before = 0 if is_replayed else self._num_asked
        elif sequence < self._expected:
            self.stats.num_duplicates += 1
            return None
        if sequence > self._expected:
            return self._hold(sequence, batch)
        self._apply(batch)
        self._apply_early()
        return None

    def replay_ended(self) -> Question | None:
        """The publisher has sent all that it had when it was asked. What to ask it for next, if
        more was lost meanwhile; what it sent nothing of stays missing."""
        if self._is_answer_outdated() or not self._early or self._num_asked > 0:
            return None
        if self._expected > self._asked_from:
            return self._ask()
        if self._asks_snapshots:
            return self.ask_snapshot()
        return self._skip_the_gap()

    def take_snapshot(
        self, next_sequence: int, batches: Sequence[EventBatch]
    ) -> Generator[None, None, ReplayRequest | None]:
        """The publisher has said all that it holds. A million tokens take about a second: it is
        applied in portions, between which others have their turn, but nothing of this publisher.

        Args:
            next_sequence: of the live batch that follows.
            batches: what it holds; none if it can't say that, or has not answered.

        Returns:
            What to ask it for next, if anything.
        """
        self._awaits_snapshot = False
        if self._is_answer_outdated():
            return None
        published_at = batches[0].published_at if batches else 0.0
        if not batches or self._is_superseded(next_sequence, published_at):
            if self._expected > self._asked_from and (self._early or not batches):
                return self._ask()
            return self._skip_the_gap() if self._early else None
        self.stats.num_snapshots += 1
        self._start_afresh(next_sequence)
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
        return self._ask() if self._early and not self._num_asked else None

    def ask_snapshot(self) -> SnapshotRequest:
        """Have the publisher say all that it holds."""
        self._num_asked += 1
        self._awaits_snapshot = True
        return SnapshotRequest()

    def _ask(self) -> ReplayRequest:
        self._asked_from = self._expected
        self._num_asked += 1
        return ReplayRequest(max(self._expected - 1, 0))

    def _is_answer_outdated(self) -> bool:
        """One of those that are awaited is there; whether it was asked of an epoch that ended."""
        self._num_asked -= 1
        if not self._num_asked_before:
            return False
        self._num_asked_before -= 1
        return True

    def _is_superseded(self, next_sequence: int, published_at: float) -> bool:
        """Whether a snapshot is older than what is known, or of an epoch that has ended. It has the
        time of the batch before ``next_sequence``, so a lower number with a later time is of a new
        epoch, as with batches."""
        if any(
            at < next_sequence and batch.published_at > published_at
            for at, batch in self._early.items()
        ):
            return True
        if next_sequence < self._expected:
            return published_at <= self._last_published
        return published_at < self._last_published

    def _skip_the_gap(self) -> ReplayRequest | None:
        """What was lost can't be had: forget what was known before it."""
        first = min(self._early)
        self._start_afresh(first)
        # Nothing is left that could be newer, and the publisher's clock may have been set back.
        self._last_published = self._early[first].published_at
        self._apply_early()
        return self._ask() if self._early else None

    def matches_digest(self, tier: Tier, num_chunks: int, xor: int) -> bool:
        """Whether the index agrees with what the instance says of itself.

        The instance's digest must be of the moment after the last applied batch.
        """
        return self._index.digest(self._slot, tier) == (num_chunks, xor)

    def _shows_a_new_epoch(self, sequence: int, batch: EventBatch) -> bool:
        """Whether a later number than this one was published sooner."""
        if sequence < self._expected:
            return batch.published_at > self._last_published
        last = max(self._early, default=-1)
        return sequence <= last and batch.published_at > self._early[last].published_at

    def _is_outdated(self, sequence: int, batch: EventBatch, is_replayed: bool) -> bool:
        """Whether a batch is of an epoch that has ended: that one was asked to replay it, or what
        came before it was published later."""
        is_next = sequence == self._expected
        return (is_replayed and bool(self._num_asked_before)) or (
            is_next and batch.published_at < self._last_published
        )

    def _hold(self, sequence: int, batch: EventBatch) -> ReplayRequest | None:
        is_new_gap = self.state is StreamState.HEALTHY
        self._early[sequence] = batch
        if len(self._early) > MAX_EARLY_BATCHES:
            return self._skip_the_gap()
        if not is_new_gap:
            return None
        self.stats.num_gaps += 1
        self._enter(StreamState.GAP)
        return None if self._awaits_snapshot else self._ask()

    def _apply_early(self) -> None:
        while (batch := self._early.pop(self._expected, None)) is not None:
            if batch.published_at < self._last_published:  # of an epoch that has ended unseen
                self.stats.num_outdated += 1
                break
            self._apply(batch)
        self._enter(StreamState.GAP if self._early else StreamState.HEALTHY)

    def _restart(self) -> None:
        """The publisher counts from the beginning again: it is another epoch of it."""
        self.stats.num_restarts += 1
        self._early.clear()
        self._start_afresh(0)
        self._awaits_snapshot = False
        self._enter(StreamState.HEALTHY)  # a gap of this epoch is asked for anew

    def _start_afresh(self, expected: int) -> None:
        self.stats.num_fresh_starts += 1
        self._clear()
        self._expected = expected

    def _clear(self) -> None:
        self._index.cleared(self._slot)
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
        """Returns of how many blocks it tells."""
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
        """Blocks of a sliding window are no prefix that a prompt could begin with."""
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
