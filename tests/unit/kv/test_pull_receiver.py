"""The decode side of pull: races between its two callers, the core and the network."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from typing import Any

import pytest
from support.virtual_time import run_virtually

from mooncake_hal.deployment import Hardware
from mooncake_hal.kv.geometry import AttentionKind, KVGeometry
from mooncake_kv.connector import Event, LoadEnded
from mooncake_kv.connector_scheduler import ConnectorContext
from mooncake_kv.handshake import IncompatiblePeers, InstanceMetadata
from mooncake_kv.kv_reader import KVReader
from mooncake_kv.lease_keeper import LeaseKeeper
from mooncake_kv.params import RemoteKV
from mooncake_kv.peers import Handshake, PeerTable
from mooncake_kv.pull_receiver import PullReceiver
from mooncake_kv.ranks import RankGroup, RankLoads

GEOMETRY = KVGeometry(AttentionKind.GQA, 1, 1, (4, 4), "float32", 4)
FACTS = InstanceMetadata("me", "m", "t", GEOMETRY, 16, Hardware("cpu", ""), ())
REMOTE = RemoteKV("peer", "theirs", "127.0.0.1", 1, (0,), 3)
LEASE_S = 0.06


@dataclass
class Environment:
    """The environment of a decode side in these tests.

    Args:
        side: the decode side; nothing answers at its peer's address.
        peers: its table of peers.
        leases: the leases at that peer.
        events: the events that the core received.
        messages: the messages that the rank received.
        has_event: set once the core has received an event.
    """

    side: PullReceiver
    peers: PeerTable
    leases: LeaseKeeper
    events: list[Event]
    messages: list[bytes]
    has_event: asyncio.Event


def run(scenario: Callable[[Environment], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        events: list[Event] = []
        has_event = asyncio.Event()
        messages: list[bytes] = []
        tasks: set[asyncio.Task[None]] = set()

        def tell(event: Event) -> None:
            events.append(event)
            has_event.set()

        def spawn(
            coroutine: Coroutine[Any, Any, None], request_id: str | None = None
        ) -> asyncio.Task[None]:
            task = asyncio.ensure_future(coroutine)
            tasks.add(task)
            return task

        ranks = RankGroup(1, lambda rank, message: messages.append(message))
        handshake = Handshake(FACTS, ranks, lambda own, peer: None, IncompatiblePeers())
        peers = PeerTable(b"", handshake)
        context = ConnectorContext(FACTS, LEASE_S, tell, spawn)
        leases = LeaseKeeper(context, peers)
        reader = KVReader(context, RankLoads(ranks), peers, leases)
        side = PullReceiver(context, reader)
        around = Environment(side, peers, leases, events, messages, has_event)
        await scenario(around)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        peers.close()
        await asyncio.sleep(0.01)

    asyncio.run(main())


def test_load_ordered_before_lost_lease_is_processed_is_not_started() -> None:
    """The core orders the load before it has processed the message that the lease is lost."""

    async def scenario(around: Environment) -> None:
        around.side.expect("mine", REMOTE)
        renewing = asyncio.ensure_future(around.leases.keep_leases())
        await around.has_event.wait()
        around.side.load("mine", (0,), 0)
        await asyncio.sleep(0)
        renewing.cancel()
        [ended] = around.events
        assert isinstance(ended, LoadEnded)
        assert ended.request_id == "mine"
        assert ended.error is not None
        assert around.messages == []

    run(scenario)


def test_interrupted_load_is_never_reported_as_complete() -> None:
    async def scenario(around: Environment) -> None:
        around.side.expect("mine", REMOTE)
        around.side.load("mine", (0,), 0)
        await asyncio.sleep(0)
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        await asyncio.sleep(0.01)
        assert around.events == [LoadEnded("mine", "the load was interrupted")]

    run(scenario)


def test_cancelled_request_is_forgotten_once() -> None:
    async def scenario(around: Environment) -> None:
        around.side.expect("mine", REMOTE)
        around.side.cancel("mine")
        around.side.cancel("mine")
        around.side.load("mine", (0,), 0)
        assert around.events == []
        assert around.messages == []

    run(scenario)


def test_unanswered_notification_keeps_the_connection_of_other_requests() -> None:
    """The peer frees the cancelled request's blocks when its lease expires."""

    async def scenario(around: Environment) -> None:
        peer = around.peers.get(REMOTE)
        peer.metadata = FACTS
        around.side.expect("mine", REMOTE)
        others = asyncio.all_tasks()
        around.side.cancel("mine")
        await asyncio.gather(*asyncio.all_tasks() - others)
        assert around.peers.get(REMOTE) is peer
        assert around.messages == []

    run(scenario)


class RenewingPeers:
    """A peer table whose peers renew everything and record when."""

    def __init__(self) -> None:
        self.renewed: list[float] = []

    def hold(self, remote: RemoteKV) -> None:
        """Do nothing: this table never evicts."""

    def release(self, remote: RemoteKV) -> None:
        """Do nothing: this table never evicts."""

    def get(self, remote: RemoteKV) -> RenewingPeers:
        return self

    async def renew(self, request_ids: tuple[str, ...], timeout_s: float) -> tuple[str, ...]:
        self.renewed.append(asyncio.get_running_loop().time())
        return ()


@pytest.mark.parametrize(("peer_lease_s", "interval_s"), [(6.0, 1.0), (600.0, 5.0), (None, 5.0)])
def test_lease_renewal_follows_shorter_lease(peer_lease_s: float | None, interval_s: float) -> None:
    """Our lease is 30 s; the peer's may expire before we would send a first keepalive."""

    async def main() -> None:
        peers = RenewingPeers()
        clock = asyncio.get_running_loop().time
        context = ConnectorContext(FACTS, 30.0, lambda event: None, asyncio.ensure_future, clock)
        loads = RankLoads(RankGroup(1, lambda rank, message: None))
        leases = LeaseKeeper(context, peers)  # type: ignore[arg-type]  # replies at once
        reader = KVReader(context, loads, peers, leases)  # type: ignore[arg-type]  # the same
        side = PullReceiver(context, reader)
        keeping = asyncio.ensure_future(leases.keep_leases())
        await asyncio.sleep(1.5)
        side.expect("mine", replace(REMOTE, lease_s=peer_lease_s))
        await asyncio.sleep(30.0)
        assert len(peers.renewed) == pytest.approx(30.0 / interval_s, abs=1)
        assert peers.renewed[0] <= 1.5 + interval_s
        assert not keeping.done()

    run_virtually(main())


def test_fully_cached_prompt_needs_no_prefill_instance() -> None:
    async def scenario(around: Environment) -> None:
        around.side.expect("mine", REMOTE)
        around.side.load("mine", (0,), REMOTE.num_tokens)
        await around.has_event.wait()
        assert around.events == [LoadEnded("mine", None)]

    run(scenario)
