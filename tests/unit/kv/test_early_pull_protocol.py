"""Both sides of an early pull, in virtual time: lost messages, preempted, aborted or killed
prefills, and readers that disconnect.

Only KV that belonged to this prompt when it was read is used, and nothing is held forever.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from support.push_line import TOKEN, TRIES, Line, deliver, dropping, metadata_of, unreliable
from support.virtual_time import SpawnedTasks, run_virtually

from mooncake_kv.connector import Event, LeaseEnded, LoadEnded
from mooncake_kv.connector_scheduler import ConnectorContext
from mooncake_kv.early_pull_receiver import EarlyPullReceiver
from mooncake_kv.early_pull_sender import EarlyPullSender, Progress
from mooncake_kv.errors import HandshakeRefused, KVTransferError
from mooncake_kv.handshake import IncompatiblePeers
from mooncake_kv.kv_reader import KVReader
from mooncake_kv.lease_keeper import LeaseKeeper
from mooncake_kv.metaserver_client import RequestMetaserver
from mooncake_kv.params import KVTransferDict, PushTarget, RemoteKV
from mooncake_kv.peers import Handshake, PeerInstance, PeerTable
from mooncake_kv.protocol import AnyMessage, LeaseReply, PrefillProgress, Reject
from mooncake_kv.pull_sender import PullSender
from mooncake_kv.ranks import CancelLoad, Load, LoadReport, RankGroup, RankLoads, decode_to_rank

LEASE_S = 6.0
LONGEST_READ_S = 4.0
CHUNK = 4
NUM_TOKENS = 16
MAX_LOAD_S = 60.0

Content = list[tuple[str, int] | None]
"""The owner of the KV in each token's slot: request and attempt."""


@dataclass
class Peers:
    """A stand-in for PeerTable: all peers are reached over one line."""

    own: str
    line: Line
    handle: Callable[[RemoteKV, AnyMessage], AnyMessage]
    ranks: RankGroup
    _known: dict[str, PeerInstance] = field(default_factory=dict)

    reach = PeerTable.reach

    def get(self, remote: RemoteKV) -> PeerInstance:
        client: Any = Client(self, remote)
        handshake = Handshake(
            metadata_of(self.own), self.ranks, lambda own, peer: ("shm",), IncompatiblePeers()
        )
        made = PeerInstance(remote.engine_id, client, handshake)
        return self._known.setdefault(remote.engine_id, made)

    def forget(self, remote: RemoteKV, reason: str, *, failed: PeerInstance | None = None) -> None:
        if failed in (None, self._known.get(remote.engine_id)):
            self._known.pop(remote.engine_id, None)

    def forget_predecessors(self, remote: RemoteKV) -> None:
        """Do nothing: each name is one epoch here."""

    def hold(self, remote: RemoteKV) -> None:
        """Do nothing: this table never evicts."""

    def release(self, remote: RemoteKV) -> None:
        """Do nothing: this table never evicts."""


@dataclass
class Client:
    """A stand-in for SideChannelClient."""

    peers: Peers
    remote: RemoteKV

    async def ask(
        self,
        make: Callable[[int], AnyMessage],
        kind: type[Any],
        *,
        tries: int = TRIES,
        try_timeout_s: float | None = None,
    ) -> Any:
        answer = await self.peers.line.ask(
            lambda message: self.peers.handle(self.remote, message), make, tries, try_timeout_s
        )
        if isinstance(answer, Reject):
            raise HandshakeRefused(answer.reason)
        assert isinstance(answer, kind)
        return answer


class PrefillInstance:
    """One epoch of a prefill instance: its senders, and the contents of its requests' blocks."""

    def __init__(self, fleet: Fleet, name: str) -> None:
        self.name = name
        self.is_dead = False
        self.content: dict[str, Content] = {}
        self.leased: set[str] = set()
        spawn = fleet.tasks.spawn
        context = ConnectorContext(metadata_of(name), LEASE_S, self._receives, spawn, fleet.now)
        self.sender = PullSender(context)
        peers: Any = Peers(
            name,
            fleet.line,
            lambda remote, message: fleet.ask_d(self, message),
            ranks(),
        )
        self.early = EarlyPullSender(context, peers, self.sender, ("p", 1))
        self.sweeping = spawn(self.sender.sweep())

    def _receives(self, event: Event) -> None:
        assert isinstance(event, LeaseEnded)
        if event.request_id in self.leased:
            self.leased.remove(event.request_id)
            self.content[event.request_id] = [None] * NUM_TOKENS

    def finish(self, request_id: str, progress: Progress) -> None:
        """Complete the prefill: the blocks belong to the lease from now on."""
        self.leased.add(request_id)
        self.early.complete(request_id, progress)

    def abort(self, request_id: str) -> None:
        self.leased.add(request_id)
        self.early.cancel(request_id, "aborted")
        self.sender.drop(request_id)


def ranks() -> RankGroup:
    return RankGroup(1, lambda rank, message: None)


@dataclass
class Fleet:
    """A decode instance, and prefill instances that start and die.

    Attributes:
        ended: the events that the decode instance's core received.
        read: by request, the contents of its blocks at the time of the read.
        begun: set once the decode instance's rank has started a read.
    """

    numbers: random.Random
    line: Line = field(default_factory=Line)
    ended: dict[str, list[LoadEnded]] = field(default_factory=dict)
    read: dict[str, Content] = field(default_factory=dict)
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    asked: asyncio.Queue[KVTransferDict] = field(default_factory=asyncio.Queue)
    prefills: dict[str, PrefillInstance] = field(default_factory=dict)
    refuses: bool = False
    _reading: dict[str, asyncio.TimerHandle] = field(default_factory=dict)
    tasks: SpawnedTasks = field(default_factory=SpawnedTasks)
    _names: Any = field(default_factory=count)

    def start(self) -> None:
        """On the loop."""
        group = RankGroup(1, self._rank_receives)
        self.loads = RankLoads(group)
        context = ConnectorContext(
            metadata_of("d"), LEASE_S, self._receives, self.tasks.spawn, self.now
        )
        peers: Any = Peers("d", self.line, self._ask_p, group)
        leases = LeaseKeeper(context, peers)
        self.reader = KVReader(context, self.loads, peers, leases)
        self.d = EarlyPullReceiver(context, self.reader, self._post, max_load_s=MAX_LOAD_S)
        self.tasks.spawn(leases.keep_leases())

    @staticmethod
    def now() -> float:
        return asyncio.get_running_loop().time()

    def prefill_instance(self) -> PrefillInstance:
        name = f"p{next(self._names)}"
        self.prefills[name] = PrefillInstance(self, name)
        return self.prefills[name]

    def load(self, name: str, start: int = 0) -> None:
        """Have the decode instance's core allocate blocks for a request."""
        params = {"remote_request_id": name, "remote_cached_tokens": start}
        params |= {"num_prompt_tokens": NUM_TOKENS, "prompt_digest": name}
        self.read[name] = [None] * NUM_TOKENS
        self.d.load(name, (0,), RequestMetaserver("http://m"), params)

    def target(self, name: str) -> PushTarget:
        remote = RemoteKV("d", name, "d", 2, (0,), NUM_TOKENS, lease_s=LEASE_S)
        return PushTarget(remote, 0, name)

    async def compute(
        self, p: PrefillInstance, name: str, *, begin: int = 0, preempt_at: int | None = None
    ) -> None:
        """Prefill a prompt chunk by chunk, after ``begin`` has announced it."""
        request_id = f"{name}@{p.name}"
        if not begin:
            p.content[request_id] = [None] * NUM_TOKENS
            p.early.begin(request_id, self.target(name))
        attempt, stop = 0, begin
        while stop < NUM_TOKENS:
            await asyncio.sleep(self.numbers.uniform(0.0, 3.0))
            if p.is_dead:
                return
            if stop == preempt_at:
                attempt, stop, preempt_at = attempt + 1, 0, None
                p.content[request_id] = [("somebody else's", 0)] * NUM_TOKENS
                continue
            for index in range(stop, stop + CHUNK):
                p.content[request_id][index] = (request_id, attempt)
            stop += CHUNK
            if stop < NUM_TOKENS:
                p.early.advance(request_id, Progress(attempt, (0,), stop))
        p.finish(request_id, Progress(attempt, (0,), NUM_TOKENS, TOKEN))

    # --- the line --------------------------------------------------------------------------

    async def _post(self, metaserver: RequestMetaserver, params: KVTransferDict) -> None:
        if self.refuses:
            raise KVTransferError("metaserver answered 500")
        self.asked.put_nowait(params)

    def ask_d(self, p: PrefillInstance, message: AnyMessage) -> AnyMessage:
        assert isinstance(message, PrefillProgress)
        return LeaseReply(message.ticket, self.d.handle(message))

    def _ask_p(self, remote: RemoteKV, message: AnyMessage) -> AnyMessage:
        return self.prefills[remote.engine_id].sender.handle(message)

    def _receives(self, event: Event) -> None:
        assert isinstance(event, LoadEnded)
        assert event.request_id not in self._reading, "ended while its rank reads"
        self.ended.setdefault(event.request_id, []).append(event)
        if event.error is None:
            found = self.read[event.request_id]
            assert None not in found
            assert len(set(found)) == 1, f"of several attempts or holders: {found}"
            [(owner, _)] = set(found)  # type: ignore[misc]  # none is None
            assert owner.startswith(f"{event.request_id}@"), "KV of another request"

    def _rank_receives(self, rank: int, message: bytes) -> None:
        order = decode_to_rank(message)
        if isinstance(order, Load):
            self.begun.set()
            delay = self.numbers.uniform(0.0, LONGEST_READ_S)
            loop = asyncio.get_running_loop()
            self._reading[order.request_id] = loop.call_later(delay, self._end_read, order)
        elif isinstance(order, CancelLoad) and order.request_id in self._reading:
            self._reading.pop(order.request_id).cancel()
            self.loads.report(0, LoadReport(order.request_id, "cancelled", 0, 0.1))

    def _end_read(self, order: Load) -> None:
        """Read what P's blocks contain now, whichever request owns them."""
        name = order.request_id
        del self._reading[name]
        p = self.prefills[order.engine_id]
        error = "the peer is gone" if p.is_dead else None
        source = p.content.get(f"{name}@{p.name}", [None] * NUM_TOKENS)
        self.read[name][order.start : order.stop] = source[order.start : order.stop]
        self.loads.report(0, LoadReport(name, error, order.stop - order.start, 0.1))


def run_on_fleet(scenario: Callable[[Fleet], Coroutine[Any, Any, None]], seed: int = 0) -> None:
    async def main() -> None:
        fleet = Fleet(random.Random(seed))
        fleet.start()
        await scenario(fleet)
        fleet.tasks.check()

    run_virtually(main())


def outcome(fleet: Fleet, name: str = "r") -> LoadEnded:
    [ended] = fleet.ended[name]
    return ended


def test_reads_start_while_prompt_is_computed() -> None:
    async def scenario(fleet: Fleet) -> None:
        p = fleet.prefill_instance()
        fleet.load("r")
        await fleet.asked.get()
        p.content["r@p0"] = [("r@p0", 0)] * NUM_TOKENS
        p.early.begin("r@p0", fleet.target("r"))
        p.early.advance("r@p0", Progress(0, (0,), CHUNK))
        await asyncio.wait_for(fleet.begun.wait(), 1.0)
        await asyncio.sleep(2 * LONGEST_READ_S)
        assert fleet.reader.counts.nbytes == CHUNK
        assert fleet.ended == {}
        p.finish("r@p0", Progress(0, (0,), NUM_TOKENS, TOKEN))
        await asyncio.sleep(2 * LONGEST_READ_S)
        assert outcome(fleet) == LoadEnded("r", None, TOKEN)
        assert fleet.reader.counts.nbytes == NUM_TOKENS, "nothing is read twice"
        assert fleet.d.num_early_bytes == CHUNK
        assert p.leased == set()

    run_on_fleet(scenario)


def test_kv_read_before_preemption_is_discarded() -> None:
    """Another request used the blocks in between, before the prompt got the same ones again."""

    async def scenario(fleet: Fleet) -> None:
        p = fleet.prefill_instance()
        fleet.load("r")
        await fleet.compute(p, "r", preempt_at=2 * CHUNK)
        await asyncio.sleep(4 * LONGEST_READ_S)
        assert outcome(fleet) == LoadEnded("r", None, TOKEN)
        assert set(fleet.read["r"]) == {("r@p0", 1)}

    run_on_fleet(scenario)


def test_cached_prefix_is_not_read() -> None:
    async def scenario(fleet: Fleet) -> None:
        p = fleet.prefill_instance()
        fleet.load("r", start=NUM_TOKENS)
        await fleet.compute(p, "r")
        fleet.read["r"] = [("r@p0", 0)] * NUM_TOKENS
        await asyncio.sleep(LEASE_S)
        assert outcome(fleet) == LoadEnded("r", None, TOKEN)
        assert not fleet.begun.is_set()
        assert p.leased == set(), "it may free its blocks"

    run_on_fleet(scenario)


def test_aborted_prefill_is_reported_immediately() -> None:
    async def scenario(fleet: Fleet) -> None:
        p = fleet.prefill_instance()
        fleet.load("r")
        p.early.begin("r@p0", fleet.target("r"))
        await asyncio.sleep(0.1)
        p.abort("r@p0")
        await asyncio.sleep(0.1)
        assert outcome(fleet).error == "the prefill instance gave up: aborted"
        assert p.leased == set()

    run_on_fleet(scenario)


def test_dead_prefill_instance_is_detected_within_two_leases() -> None:
    async def scenario(fleet: Fleet) -> None:
        p = fleet.prefill_instance()
        fleet.load("r")
        p.early.begin("r@p0", fleet.target("r"))
        await asyncio.sleep(0.1)
        fleet.line.is_cut = True
        await asyncio.sleep(2 * LEASE_S + 3 * TRIES)
        assert outcome(fleet).error == "no answer"

    run_on_fleet(scenario)


@pytest.mark.parametrize("has_read", [False, True])
def test_second_prefill_replaces_a_dead_one(*, has_read: bool) -> None:
    """The proxy sees the first instance's connection close, and sends the prefill to another
    one."""

    async def scenario(fleet: Fleet) -> None:
        dead, alive = fleet.prefill_instance(), fleet.prefill_instance()
        fleet.load("r")
        dead.early.begin("r@p0", fleet.target("r"))
        dead.early.advance("r@p0", Progress(0, (0,), CHUNK))
        await fleet.begun.wait()
        await asyncio.sleep(LONGEST_READ_S if has_read else 0.0)
        dead.is_dead = True
        await fleet.compute(alive, "r")
        dead.early.advance("r@p0", Progress(0, (0,), 3 * CHUNK))  # too late to be used
        await asyncio.sleep(4 * LONGEST_READ_S)
        assert outcome(fleet) == LoadEnded("r", None, TOKEN)
        assert set(fleet.read["r"]) == {("r@p1", 0)}
        assert not dead.sender.is_held("r@p0")

    run_on_fleet(scenario)


def test_late_end_of_a_replaced_prefill_does_not_affect_its_successor() -> None:
    """The first prefill's messages were delayed; only the newest state is sent, so the first one is
    an error."""

    async def scenario(fleet: Fleet) -> None:
        given_up, successor = fleet.prefill_instance(), fleet.prefill_instance()
        fleet.load("r")
        successor.content["r@p1"] = [("r@p1", 0)] * NUM_TOKENS
        successor.early.begin("r@p1", fleet.target("r"))
        successor.early.advance("r@p1", Progress(0, (0,), CHUNK))
        await fleet.begun.wait()
        given_up.early.begin("r@p0", fleet.target("r"))
        given_up.abort("r@p0")
        await asyncio.sleep(LONGEST_READ_S)
        successor.finish("r@p1", Progress(0, (0,), NUM_TOKENS, TOKEN))
        await asyncio.sleep(2 * LONGEST_READ_S)
        assert outcome(fleet) == LoadEnded("r", None, TOKEN)
        assert set(fleet.read["r"]) == {("r@p1", 0)}
        assert given_up.leased == successor.leased == set()

    run_on_fleet(scenario)


def test_disconnected_reader_ends_lease_during_prefill() -> None:
    async def scenario(fleet: Fleet) -> None:
        p = fleet.prefill_instance()
        fleet.load("r")
        computing = fleet.tasks.spawn(fleet.compute(p, "r"))
        await fleet.begun.wait()
        fleet.d.cancel("r")
        await asyncio.sleep(0.1)
        assert outcome(fleet).error is not None
        assert fleet.reader.counts.failures == 0, "nobody lacks the KV"
        assert not p.sender.is_held("r@p0")
        await computing
        assert p.leased == set(), "its blocks are freed once it is computed"

    run_on_fleet(scenario)


def test_request_without_prefill_fails_after_lease_time() -> None:
    async def scenario(fleet: Fleet) -> None:
        fleet.load("r")
        await asyncio.sleep(LEASE_S + 0.1)
        assert outcome(fleet).error == "no instance began its prefill within 6 s"
        fleet.refuses = True
        fleet.load("s")
        await asyncio.sleep(0.1)
        assert outcome(fleet, "s").error == "metaserver answered 500"

    run_on_fleet(scenario)


def test_prefill_that_never_completes_times_out() -> None:
    """Even if P is alive and has just reported progress."""

    async def scenario(fleet: Fleet) -> None:
        p = fleet.prefill_instance()
        fleet.load("r")
        p.content["r@p0"] = [("r@p0", 0)] * NUM_TOKENS
        p.early.begin("r@p0", fleet.target("r"))
        await asyncio.sleep(MAX_LOAD_S - 1.0)
        p.early.advance("r@p0", Progress(0, (0,), CHUNK))
        await asyncio.sleep(0.5)
        assert fleet.ended == {}
        await asyncio.sleep(0.5 + LONGEST_READ_S)  # reads in flight complete first
        assert outcome(fleet).error == (
            f"its prefill was not complete within {MAX_LOAD_S:g} s (--early-pull-timeout-seconds)"
        )
        await asyncio.sleep(LEASE_S)
        assert not p.sender.is_held("r@p0"), "no reader waits for P's prefill"

    run_on_fleet(scenario)


def test_other_prompt_is_not_read() -> None:
    async def scenario(fleet: Fleet) -> None:
        p = fleet.prefill_instance()
        fleet.load("r")
        other = fleet.target("r")
        p.early.begin("r@p0", PushTarget(other.remote, 0, "another digest"))
        await asyncio.sleep(1.0)
        assert not p.sender.is_held("r@p0")
        assert fleet.ended == {}

    run_on_fleet(scenario)


def test_incomplete_prefill_does_not_complete_the_load() -> None:
    async def scenario(fleet: Fleet) -> None:
        p = fleet.prefill_instance()
        fleet.load("r")
        p.early.begin("r@p0", fleet.target("r"))
        await asyncio.sleep(0.1)
        p.finish("r@p0", Progress(0, (0,), NUM_TOKENS - CHUNK, TOKEN))
        await asyncio.sleep(2 * LEASE_S)
        assert outcome(fleet).error is not None
        assert p.leased == set()

    run_on_fleet(scenario)


def test_lost_first_token_is_sent_again() -> None:
    async def scenario(fleet: Fleet) -> None:
        p = fleet.prefill_instance()
        fleet.load("r")
        await fleet.compute(p, "r")
        fleet.line.delivery = dropping("LeaseReply")
        await asyncio.sleep(1.0)
        fleet.line.delivery = deliver
        await asyncio.sleep(4 * LONGEST_READ_S)
        assert outcome(fleet) == LoadEnded("r", None, TOKEN)

    run_on_fleet(scenario)


@settings(max_examples=120)
@given(seed=st.integers(0, 2**32), loses=st.booleans(), kills=st.booleans())
def test_lost_messages_cause_no_leak_and_no_use_of_foreign_kv(
    seed: int, *, loses: bool, kills: bool
) -> None:
    async def scenario(fleet: Fleet) -> None:
        if loses:
            fleet.line.delivery = unreliable(seed)
        names = [f"r{index}" for index in range(6)]
        await asyncio.gather(*(_live(fleet, name, kills=kills) for name in names))
        fleet.line.delivery = deliver
        await asyncio.sleep(MAX_LOAD_S + 10 * LEASE_S)
        assert len(fleet.d) == 0
        assert {name: len(ends) for name, ends in fleet.ended.items()} == dict.fromkeys(names, 1)
        for p in fleet.prefills.values():
            assert p.is_dead or (p.leased == set() and p.sender.num_held == 0)

    run_on_fleet(scenario, seed)


async def _live(fleet: Fleet, name: str, *, kills: bool) -> None:
    numbers = fleet.numbers
    await asyncio.sleep(numbers.uniform(0.0, 10.0))
    fleet.load(name)
    num_holders = numbers.choice([0, 1, 1, 1, 2])
    for _ in range(num_holders):
        p = fleet.prefill_instance()
        preempt_at = numbers.choice([None, None, CHUNK, 3 * CHUNK])
        computing = fleet.tasks.spawn(fleet.compute(p, name, preempt_at=preempt_at))
        await asyncio.sleep(numbers.uniform(0.0, 12.0))
        fate = numbers.random()
        if kills and fate < 0.3:
            p.is_dead = True
            p.sweeping.cancel()
        elif fate < 0.5 and not computing.done():
            computing.cancel()
            p.abort(f"{name}@{p.name}")
    if numbers.random() < 0.3:
        fleet.d.cancel(name)
