"""Any order of the KVCache pool's events keeps the KV of requests and of chunks right."""

from __future__ import annotations

from typing import Any

from hypothesis import settings, strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule
from support.scheduler_machine import (
    BLOCKS,
    BUDGET,
    HOST_BLOCKS,
    LIMITS,
    MAX_SEQS,
    SchedulerMachine,
)
from support.scheduling import Bench
from support.scheduling_pool import ContentPool, PooledWorker, PoolLoad

from mooncake_kv.pool.pool_events import ChunkSource, LoadReleased
from mooncake_kv.store.chunk_store import Tier

FAR = ChunkSource(1, Tier.DRAM)


class PooledBench(Bench):
    worker_type = PooledWorker


class PoolMachine(SchedulerMachine):
    """The scheduler with a pool whose chunks have the content that they were copied from."""

    @initialize(
        host_blocks=st.sampled_from([0, HOST_BLOCKS]),
        watermark=st.sampled_from([0.0, 0.1]),
        prefix_caching=st.booleans(),
        num_draft_tokens=st.sampled_from([0, 1, 5]),
        flights=st.sampled_from([(1, False), (1, True), (2, False), (2, True), (3, True)]),
        copies_late=st.booleans(),
        chunk_tokens=st.sampled_from([4, 8]),
        always_loads=st.booleans(),
        num_stored=st.sampled_from([0, 20, 20, 20]),
        releases_at_once=st.booleans(),
        limits=st.sampled_from(LIMITS),
    )
    def begin(
        self,
        host_blocks: int,
        watermark: float,
        prefix_caching: bool,
        num_draft_tokens: int,
        flights: tuple[int, bool],
        copies_late: bool,
        chunk_tokens: int,
        always_loads: bool,
        num_stored: int,
        releases_at_once: bool,
        limits: dict[str, Any],
    ) -> None:
        self.pool = ContentPool(chunk_tokens, block_size=4)
        self.pool.always_loads, self.pool.releases_at_once = always_loads, releases_at_once
        for family in range(3):
            self.pool.fill([100 * family + index for index in range(num_stored)])
        self.bench = PooledBench(
            BLOCKS,
            num_host_blocks=host_blocks,
            prefix_caching=prefix_caching,
            token=None,
            max_num_seqs=MAX_SEQS,
            max_num_batched_tokens=BUDGET,
            watermark=watermark,
            num_speculative_tokens=num_draft_tokens,
            depth=flights[0],
            uses_async_scheduling=flights[1],
            pool=self.pool,
            **limits,
        )
        self.bench.worker.pool = self.pool
        self.bench.worker.copies_late = copies_late
        self.scheduler = self.bench.scheduler

    @property
    def is_cramped(self) -> bool:
        loads = any(load.ended_at > self.pool.next_step for load in self.pool.loads.values())
        return super().is_cramped or loads

    # -- loads ------------------------------------------------------------------------------

    @rule(
        answers_at_once=st.booleans(),
        is_busy=st.booleans(),
        dooms=st.booleans(),
        releases_at_once=st.booleans(),
    )
    def pool_changes(
        self, answers_at_once: bool, is_busy: bool, dooms: bool, releases_at_once: bool
    ) -> None:
        self.pool.answers_at_once, self.pool.is_busy = answers_at_once, is_busy
        self.pool.dooms, self.pool.releases_at_once = dooms, releases_at_once

    @precondition(lambda self: self.pool.asked)
    @rule(data=st.data())
    def store_answers(self, data: st.DataObject) -> None:
        self.pool.answer(data.draw(st.sampled_from(sorted(self.pool.asked))))

    @precondition(lambda self: self._active())
    @rule(data=st.data(), num_tokens=st.integers(1, 12))
    def load_writes(self, data: st.DataObject, num_tokens: int) -> None:
        self.pool.write(self._draw_load(data), self.bench.worker, num_tokens)

    @precondition(lambda self: self._active())
    @rule(data=st.data())
    def load_is_released(self, data: st.DataObject) -> None:
        load = self._draw_load(data)
        if load.request.release_layers is not None and not load.is_released:
            self.pool.release(load)

    @precondition(lambda self: self._active())
    @rule(data=st.data(), fails=st.sampled_from([False, False, True]))
    def pool_load_ends(self, data: st.DataObject, fails: bool) -> None:
        load = self._draw_load(data)
        if not fails and not load.is_doomed:
            self.pool.write(load, self.bench.worker, 1 << 20)
        is_right = self.pool.is_complete(load) and not fails
        self.pool.end_load(load, None if is_right else "lost")

    def _active(self) -> dict[str, PoolLoad]:
        return {name: load for name, load in self.pool.loads.items() if not load.has_ended}

    def _draw_load(self, data: st.DataObject) -> PoolLoad:
        active = self._active()
        return active[data.draw(st.sampled_from(sorted(active)))]

    # -- saves ------------------------------------------------------------------------------

    def _copying(self) -> list[str]:
        """Saves that are not copied, and whose step has run."""
        return [
            name
            for name, save in self.pool.saves.items()
            if not save.is_copied
            and (save.request.step is None or save.request.step <= self.bench.worker.step)
        ]

    @precondition(lambda self: self._copying())
    @rule(data=st.data(), num_tokens=st.integers(1, 8))
    def save_copies(self, data: st.DataObject, num_tokens: int) -> None:
        save = self.pool.saves[data.draw(st.sampled_from(self._copying()))]
        self.pool.copy(save, self.bench.worker, num_tokens)

    @precondition(lambda self: self._copying())
    @rule(data=st.data(), is_complete=st.sampled_from([True, True, False]))
    def save_ends(self, data: st.DataObject, is_complete: bool) -> None:
        self._end_save(data.draw(st.sampled_from(self._copying())), is_complete)

    @precondition(lambda self: self._copying())
    @rule(data=st.data())
    def store_refuses(self, data: st.DataObject) -> None:
        save = self.pool.saves[data.draw(st.sampled_from(self._copying()))]
        if not save.content:
            first, stop = save.request.first_chunk, len(save.request.keys)
            refused = data.draw(st.integers(first, stop - 1))
            save.num_chunks = refused
            self._end_save(save.request.save_id, refused > first, refused)

    def _end_save(self, name: str, is_complete: bool, refused_chunk: int | None = None) -> None:
        save = self.pool.saves[name]
        self.pool.copy(save, self.bench.worker, 1 << 20)
        self.pool.end_copy(save, refused_chunk, is_complete)

    # -- the store and the core ---------------------------------------------------------------

    @precondition(lambda self: self.pool.stored)
    @rule(data=st.data(), is_lost=st.booleans())
    def chunk_moves(self, data: st.DataObject, is_lost: bool) -> None:
        """A chunk is evicted, or only another store has it."""
        key = data.draw(st.sampled_from(list(self.pool.stored)))
        content, _ = self.pool.stored.pop(key)
        if not is_lost:
            self.pool.stored[key] = content, FAR

    @precondition(lambda self: self.pool.events)
    @rule(count=st.integers(1, 4))
    def core_takes_events(self, count: int) -> None:
        for _ in range(min(count, len(self.pool.events))):
            event = self.pool.events.popleft()
            self.scheduler.handle_pool_event(event)
            is_unproven = False
            if isinstance(event, LoadReleased):
                name = self.pool.loads[event.load_id].request.request_id
                request = self.scheduler._queues.requests.get(name)
                is_its = request is not None and request.pool_load == event.load_id
                is_unproven = request is not None and is_its and request.is_unproven
            self.pool.next_step = self.scheduler._step
            self.pool.handled(event, is_unproven=is_unproven)

    @rule()
    def device_evicts(self) -> None:
        """Blocks that are cached and free are taken for something else."""
        pool = self.scheduler.blocks.pool
        pool.release(pool.allocate(pool.num_free) or [])

    @rule(count=st.integers(2, 8))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.core_takes_events(len(self.pool.events))
            self._take(self.bench.step()[1])

    @invariant()
    def loads_own_their_blocks(self) -> None:
        if hasattr(self, "scheduler"):
            references = self.scheduler.blocks.pool.references
            for load in self._active().values():
                assert all(references[block] for block in load.request.block_ids)

    def settle(self) -> None:
        for name in list(self.pool.asked):
            self.pool.answer(name)
        for load in self._active().values():
            self.pool.write(load, self.bench.worker, 1 << 20)
            self.pool.end_load(load, None if self.pool.is_complete(load) else "lost")
        for name in self._copying():
            self._end_save(name, True)
        self.core_takes_events(len(self.pool.events))
        self.pool.is_busy = self.pool.dooms = False

    def check_end(self) -> None:
        loads = self.scheduler._pool.loads
        assert not self._active()
        assert not loads._loads
        assert not loads._parked
        assert not loads.num_unproven


PoolMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=50)
TestPoolMachine = PoolMachine.TestCase
