"""Both sides of a pull when messages are lost and the prefill instance dies; in virtual time.

KV of blocks that another request may have reused is never decoded from, and nothing is held
forever.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings, strategies as st
from support.push_line import TRIES, Line, deliver, dropping, metadata_of, unreliable
from support.virtual_time import SpawnedTasks, run_virtually

from mooncake_kv.connector import Event, LeaseEnded, LoadEnded
from mooncake_kv.connector_scheduler import ConnectorContext
from mooncake_kv.errors import HandshakeRefused
from mooncake_kv.handshake import IncompatiblePeers
from mooncake_kv.kv_reader import KVReader
from mooncake_kv.lease_keeper import LeaseKeeper
from mooncake_kv.params import RemoteKV
from mooncake_kv.peers import Handshake, PeerInstance, PeerTable
from mooncake_kv.protocol import AnyMessage, Reject
from mooncake_kv.pull_receiver import PullReceiver
from mooncake_kv.pull_sender import PullSender
from mooncake_kv.ranks import CancelLoad, Load, LoadReport, RankGroup, RankLoads, decode_to_rank

LEASE_S = 6.0
LONGEST_READ_S = 4.0
ADDRESS = ("127.0.0.1", 1)


@dataclass
class Pair:
    """A prefill instance that is restarted now and then, and a decode instance with one rank.

    Args:
        numbers: the source of all randomness.
        model: the prefill instance's model; the decode instance has "m".

    Attributes:
        epoch: the prefill instance's epoch.
        freed: by request, the time at which its blocks were no longer held for the reader.
        has_begun: set once the decode instance's rank has started a read.
        read: by request, the time at which the rank had read everything.
        loaded: the loads that the decode instance's core has ordered.
        ended: the events that this core received.
        incompatible: the incompatible pairs that the decode instance remembers.
        num_received: by type, the number of messages that the prefill instance received.
    """

    numbers: random.Random
    model: str = "m"
    line: Line = field(default_factory=Line)
    epoch: int = 0
    freed: dict[str, float] = field(default_factory=dict)
    has_begun: asyncio.Event = field(default_factory=asyncio.Event)
    read: dict[str, float] = field(default_factory=dict)
    loaded: set[str] = field(default_factory=set)
    ended: defaultdict[str, list[LoadEnded]] = field(default_factory=lambda: defaultdict(list))
    incompatible: IncompatiblePeers = field(default_factory=IncompatiblePeers)
    num_received: Counter[str] = field(default_factory=Counter)
    _held: set[str] = field(default_factory=set)
    _remotes: dict[str, RemoteKV] = field(default_factory=dict)
    _reading: dict[str, asyncio.TimerHandle] = field(default_factory=dict)
    _peers: dict[str, PeerInstance] = field(default_factory=dict)
    tasks: SpawnedTasks = field(default_factory=SpawnedTasks)
    _tasks_of_p: list[asyncio.Task[None]] = field(default_factory=list)

    def start(self) -> None:
        """Start; call it on the loop."""
        self.group = RankGroup(1, self._rank_receives)
        self.loads = RankLoads(self.group)
        context = ConnectorContext(
            metadata_of("d"),
            LEASE_S,
            self._d_receives,
            self.tasks.spawn,
            self.now,
            incompatible=self.incompatible,
        )
        leases = LeaseKeeper(context, self)  # type: ignore[arg-type]  # as PeerTable
        self.reader = KVReader(context, self.loads, self, leases)  # type: ignore[arg-type]  # as above
        self.d = PullReceiver(context, self.reader)
        self.tasks.spawn(leases.keep_leases())
        self.start_p()

    @staticmethod
    def now() -> float:
        return asyncio.get_running_loop().time()

    # --- the prefill instance ----------------------------------------------------------------

    def start_p(self) -> None:
        self.kill_p()
        self.epoch += 1
        name = f"p{self.epoch}"
        facts = msgspec.structs.replace(metadata_of(name), model_fingerprint=self.model)
        context = ConnectorContext(facts, LEASE_S, self._p_receives, self.tasks.spawn, self.now)
        self.p = PullSender(context)
        self._tasks_of_p = [self.tasks.spawn(self.p.sweep())]

    def kill_p(self) -> None:
        """Stop P as SIGKILL does; its successor knows nothing of the KV that it held."""
        for task in self._tasks_of_p:
            task.cancel()
        for request_id in list(self._held):
            self._p_receives(LeaseEnded(request_id))

    def prefill(self, name: str) -> RemoteKV:
        """Compute a prompt and keep its KV for the reader."""
        request_id = f"{name}@{self.epoch}"
        self._held.add(request_id)
        self.p.grant(request_id)
        return RemoteKV(f"p{self.epoch}", request_id, *ADDRESS, (0,), 10, lease_s=LEASE_S)

    def _p_receives(self, event: Event) -> None:
        assert isinstance(event, LeaseEnded)
        assert event.request_id in self._held, "freed twice"
        self._held.remove(event.request_id)
        self.freed[event.request_id] = self.now()

    def _handle(self, message: AnyMessage) -> AnyMessage:
        self.num_received[type(message).__name__] += 1
        try:
            return self.p.handle(message)
        except HandshakeRefused as exc:
            return Reject(message.ticket, str(exc))

    # --- the decode instance -----------------------------------------------------------------

    def expect(self, name: str, remote: RemoteKV) -> None:
        self._remotes[name] = remote
        self.d.expect(name, remote)

    def load(self, name: str, start: int = 0) -> None:
        self.loaded.add(name)
        self.d.load(name, (0,), start)

    def _d_receives(self, event: Event) -> None:
        assert isinstance(event, LoadEnded)
        name = event.request_id
        assert name not in self._reading, "ended while its rank reads"
        self.ended[name].append(event)
        if event.error is None and name in self.read:  # otherwise D had the whole prompt cached
            freed = self.freed.get(self._remotes[name].request_id, self.now())
            assert self.read[name] <= freed, "the KV read may have belonged to another request"

    def _rank_receives(self, rank: int, message: bytes) -> None:
        order = decode_to_rank(message)
        if isinstance(order, Load):
            delay = self.numbers.uniform(0.0, LONGEST_READ_S)
            read = asyncio.get_running_loop().call_later(delay, self._end_read, order, None)
            self._reading[order.request_id] = read
            self.has_begun.set()
        elif isinstance(order, CancelLoad) and order.request_id in self._reading:
            self._reading[order.request_id].cancel()
            self._end_read(order, "cancelled")

    def _end_read(self, order: Load | CancelLoad, error: str | None) -> None:
        name = order.request_id
        del self._reading[name]
        self.read[name] = self.now()
        self.loads.report(0, LoadReport(name, error, 1, 0.1))

    # --- its peers ---------------------------------------------------------------------------

    reach = PeerTable.reach

    def get(self, remote: RemoteKV) -> PeerInstance:
        client: Any = self
        handshake = Handshake(
            metadata_of("d"), self.group, lambda own, peer: None, self.incompatible
        )
        known = PeerInstance(remote.engine_id, client, handshake)
        return self._peers.setdefault(remote.engine_id, known)

    def forget(self, remote: RemoteKV, reason: str, *, failed: PeerInstance | None = None) -> None:
        if failed in (None, self._peers.get(remote.engine_id)):
            self._peers.pop(remote.engine_id, None)

    def hold(self, remote: RemoteKV) -> None:
        """Do nothing: this table never evicts."""

    def release(self, remote: RemoteKV) -> None:
        """Do nothing: this table never evicts."""

    def forget_predecessors(self, remote: RemoteKV) -> None:
        for name in set(self._peers) - {remote.engine_id}:
            del self._peers[name]

    async def ask(
        self,
        make: Callable[[int], AnyMessage],
        kind: type[Any],
        *,
        tries: int = TRIES,
        try_timeout_s: float | None = None,
    ) -> Any:
        """As ``SideChannelClient.ask``."""
        answer = await self.line.ask(self._handle, make, tries, try_timeout_s)
        if isinstance(answer, Reject):
            raise HandshakeRefused(answer.reason)
        assert isinstance(answer, kind)
        return answer


def run_on_pair(
    scenario: Callable[[Pair], Coroutine[Any, Any, None]], seed: int = 0, model: str = "m"
) -> None:
    async def main() -> None:
        pair = Pair(random.Random(seed), model)
        pair.start()
        await scenario(pair)
        pair.tasks.check()

    run_virtually(main())


def test_pull_ends_once_on_both_sides() -> None:
    async def scenario(pair: Pair) -> None:
        pair.expect("r", pair.prefill("r"))
        await asyncio.sleep(3 * LEASE_S)
        assert pair.p.num_held == 1, "it is still needed"
        pair.load("r")
        await asyncio.sleep(2 * LONGEST_READ_S)
        assert pair.ended["r"] == [LoadEnded("r", None)]
        assert pair.p.num_held == 0

    run_on_pair(scenario)


def test_kv_read_from_dead_instance_is_not_used() -> None:
    """The successor, at the same address, knows nothing of the request."""

    async def scenario(pair: Pair) -> None:
        pair.expect("r", pair.prefill("r"))
        pair.load("r")
        await pair.has_begun.wait()
        pair.start_p()
        await asyncio.sleep(2 * LONGEST_READ_S)
        [ended] = pair.ended["r"]
        assert "lease was unknown when the read ended" in str(ended.error)

    run_on_pair(scenario)


def test_incompatible_instance_is_asked_once(caplog: pytest.LogCaptureFixture) -> None:
    """Later requests fail at once, without a message; the successor is asked again."""
    decode_side = "mooncake_kv.kv_reader"

    async def scenario(pair: Pair) -> None:
        for name in "abc":
            pair.expect(name, pair.prefill(name))
            pair.load(name)
            await asyncio.sleep(1.0)
            [ended] = pair.ended[name]
            assert "model differs" in str(ended.error)
        assert pair.num_received["Hello"] == 1
        assert pair.p.num_held == 0
        assert (pair.reader.counts.failures, pair.reader.counts.refused) == (3, 3)
        assert pair.incompatible.engine_ids == ("p1",)
        pair.model = "m"
        pair.start_p()
        pair.expect("d", pair.prefill("d"))
        pair.load("d")
        await asyncio.sleep(2 * LONGEST_READ_S)
        assert pair.ended["d"] == [LoadEnded("d", None)]

    run_on_pair(scenario, model="other")
    loud = [r for r in caplog.records if r.name == decode_side and r.levelno >= logging.WARNING]
    assert loud == []


def test_repeated_release_gets_same_reply() -> None:
    async def scenario(pair: Pair) -> None:
        pair.line.delivery = dropping("LeaseReply")
        pair.expect("r", pair.prefill("r"))
        pair.load("r")
        await asyncio.sleep(LONGEST_READ_S + 1.0)
        pair.line.delivery = deliver
        await asyncio.sleep(LONGEST_READ_S)
        assert pair.ended["r"] == [LoadEnded("r", None)]

    run_on_pair(scenario)


@settings(max_examples=150)
@given(seed=st.integers(0, 2**32), loses=st.booleans(), restarts=st.booleans())
def test_lost_messages_cause_no_leak_and_no_use_of_foreign_kv(
    seed: int, *, loses: bool, restarts: bool
) -> None:
    """Requests arrive, some twice for one prompt, and are loaded and cancelled at any moment."""

    async def scenario(pair: Pair) -> None:
        if loses:
            pair.line.delivery = unreliable(seed)
        names = [f"r{index}" for index in range(8)]
        living = [_live(pair, name) for name in names]
        if restarts:
            living.append(_restart(pair))
        await asyncio.gather(*living)
        pair.line.delivery = deliver
        await asyncio.sleep(10 * LEASE_S)
        assert pair.p.num_held == 0
        assert pair.d._expected == {}
        successes = Counter(
            pair._remotes[name].request_id
            for name, events in pair.ended.items()
            for event in events
            if event.error is None and name in pair.read
        )
        assert all(count == 1 for count in successes.values()), "one lease, two readers"
        ends = {name: len(events) for name, events in pair.ended.items()}
        assert all(ends.get(name) == 1 for name in pair.loaded), "a load that never completed"
        assert max(ends.values(), default=0) <= 1, pair.ended

    run_on_pair(scenario, seed)


async def _live(pair: Pair, name: str) -> None:
    numbers = pair.numbers
    await asyncio.sleep(numbers.uniform(0.0, 20.0))
    remote = pair.prefill(name)
    if numbers.random() < 0.1:
        return  # never fetched
    twins = [name] if numbers.random() < 0.7 else [name, f"{name}-again"]
    for twin in twins:
        await asyncio.sleep(numbers.uniform(0.0, LEASE_S))
        pair.expect(twin, remote)
    for twin in twins:
        await asyncio.sleep(numbers.uniform(0.0, LEASE_S))
        if numbers.random() < 0.8:
            pair.load(twin, numbers.choice([0, 0, 0, 10]))
        await asyncio.sleep(numbers.uniform(0.0, LONGEST_READ_S))
        if numbers.random() < 0.3 or not pair.ended[twin]:
            pair.d.cancel(twin)


async def _restart(pair: Pair) -> None:
    for _ in range(2):
        await asyncio.sleep(pair.numbers.uniform(0.0, 15.0))
        pair.start_p()
