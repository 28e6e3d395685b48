"""The table of peers: keys, handshakes, eviction, and the consequences of dropping a peer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from mooncake_hal.deployment import Hardware
from mooncake_hal.kv.geometry import AttentionKind, KVGeometry
from mooncake_kv.errors import HandshakeRefused, KVTransferError
from mooncake_kv.handshake import IncompatiblePeers, InstanceMetadata
from mooncake_kv.params import RemoteKV
from mooncake_kv.peers import IDLE_S, MAX_PEERS, Handshake, PeerInstance, PeerTable
from mooncake_kv.ranks import ConnectPeer, ForgetPeer

FACTS = InstanceMetadata(
    "a",
    "model",
    "tokenizer",
    KVGeometry(AttentionKind.GQA, 2, 4, (16, 16), "float32", 4),
    16,
    Hardware("cpu", "x86_64"),
    (),
)


class Ranks:
    """Records the messages sent to ranks."""

    def __init__(self) -> None:
        self.broadcasts: list[ConnectPeer | ForgetPeer] = []

    def broadcast(self, message: ConnectPeer | ForgetPeer) -> None:
        self.broadcasts.append(message)


def handshake_of(ranks: Ranks, incompatible: IncompatiblePeers | None = None) -> Handshake:
    incompatible = incompatible or IncompatiblePeers()
    return Handshake(FACTS, ranks, lambda own, peer: None, incompatible)  # type: ignore[arg-type]


def held_by(engine_id: str, port: int = 5000) -> RemoteKV:
    return RemoteKV(engine_id, "request", "127.0.0.1", port, (0,), 3)


def run(scenario: Callable[[PeerTable, Ranks], Coroutine[Any, Any, None]]) -> None:
    """Run a scenario with an empty peer table."""

    async def main() -> None:
        ranks = Ranks()
        peers = PeerTable(b"", handshake_of(ranks))
        await scenario(peers, ranks)
        peers.close()
        await asyncio.sleep(0.01)

    asyncio.run(main())


def test_peer_is_one_epoch_at_one_address() -> None:
    async def scenario(peers: PeerTable, ranks: Ranks) -> None:
        first = peers.get(held_by("a"))
        assert peers.get(held_by("a")) is first
        assert peers.get(held_by("a", port=5001)) is not first
        assert peers.get(held_by("b")) is not first

    run(scenario)


def test_dropping_a_wrong_address_keeps_the_right_one() -> None:
    async def scenario(peers: PeerTable, ranks: Ranks) -> None:
        right, wrong = held_by("a"), held_by("a", port=5001)
        peer = peers.get(right)
        peer.metadata = FACTS
        peers.get(wrong)
        peers.forget(wrong, "nobody there")
        assert peers.get(right) is peer
        assert ranks.broadcasts == []
        peers.forget(right, "gone")
        peers.forget(right, "gone")
        assert ranks.broadcasts == [ForgetPeer("a")]
        assert peers.get(right) is not peer

    run(scenario)


def test_failed_handshake_keeps_the_peer_that_has_taken_its_place() -> None:
    async def scenario(peers: PeerTable, ranks: Ranks) -> None:
        remote = held_by("a", port=1)
        waiting = asyncio.ensure_future(peers.reach(remote))
        await asyncio.sleep(0)
        peers.forget(remote, "it is silent")
        successor = peers.get(remote)
        with pytest.raises(KVTransferError, match="it is silent"):
            await waiting
        assert peers.get(remote) is successor

    run(scenario)


def test_only_predecessors_at_the_same_address_are_dropped() -> None:
    async def scenario(peers: PeerTable, ranks: Ranks) -> None:
        old, elsewhere, new = held_by("old"), held_by("other", port=5001), held_by("new")
        stale, other, current = peers.get(old), peers.get(elsewhere), peers.get(new)
        stale.metadata = FACTS
        peers.forget_predecessors(new)
        assert ranks.broadcasts == [ForgetPeer("old")]
        assert peers.get(new) is current
        assert peers.get(elsewhere) is other
        assert peers.get(old) is not stale

    run(scenario)


def test_unused_peer_is_dropped() -> None:
    """It may be gone for good, without anything that would detect it."""

    async def scenario(peers: PeerTable, ranks: Ranks) -> None:
        began = asyncio.get_running_loop().time()
        peer = peers.get(held_by("a"))
        peer.metadata = FACTS
        peers.forget_idle(began + IDLE_S)
        assert peers.get(held_by("a")) is peer
        assert ranks.broadcasts == []
        peers.forget_idle(asyncio.get_running_loop().time() + IDLE_S + 1.0)
        assert ranks.broadcasts == [ForgetPeer("a")]
        assert peers.get(held_by("a")) is not peer

    run(scenario)


def test_requests_to_a_dropped_peer_fail_with_the_reason() -> None:
    async def scenario(peers: PeerTable, ranks: Ranks) -> None:
        remote = held_by("a", port=1)
        waiting = asyncio.ensure_future(peers.get(remote).failed("request", "no use"))
        await asyncio.sleep(0)
        peers.forget(remote, "it is silent")
        with pytest.raises(KVTransferError, match="was closed: it is silent"):
            await waiting

    run(scenario)


class RejectingClient:
    """A side channel that rejects every request."""

    def __init__(self) -> None:
        self.num_asked = 0

    async def ask(self, *_: Any) -> Any:
        self.num_asked += 1
        raise HandshakeRefused("model differs")


def test_rejected_handshake_is_not_repeated() -> None:
    """Metadata doesn't change during an epoch."""

    async def main() -> None:
        client: Any = RejectingClient()
        incompatible = IncompatiblePeers()
        peer = PeerInstance("a", client, handshake_of(Ranks(), incompatible))
        for _ in range(3):
            with pytest.raises(HandshakeRefused, match=r"^model differs$"):
                await peer.handshake()
        assert client.num_asked == 1
        assert "a" in incompatible

    asyncio.run(main())


def small_table(max_peers: int) -> tuple[PeerTable, Ranks]:
    ranks = Ranks()
    return PeerTable(b"", handshake_of(ranks), max_peers), ranks


def test_least_recently_used_peer_is_evicted() -> None:
    async def main() -> None:
        peers, ranks = small_table(3)
        known = [peers.get(held_by(name)) for name in "abc"]
        for peer in known:
            peer.metadata = FACTS
        peers.get(held_by("a"))
        peers.get(held_by("d"))
        assert len(peers) == 3
        assert ranks.broadcasts == [ForgetPeer("b")]
        assert peers.get(held_by("a")) is known[0]
        peers.close()

    asyncio.run(main())


def test_peer_with_leases_is_not_evicted() -> None:
    async def main() -> None:
        peers, _ = small_table(2)
        busy = peers.get(held_by("a"))
        peers.hold(held_by("a"))
        for number in range(10):
            peers.get(held_by(f"p{number}"))
        assert peers.get(held_by("a")) is busy
        peers.release(held_by("a"))
        for number in range(10):
            peers.get(held_by(f"q{number}"))
        assert peers.get(held_by("a")) is not busy
        peers.close()

    asyncio.run(main())


def test_peers_beyond_the_limit_fail_alone(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        peers, _ = small_table(2)
        for name in "ab":
            peers.hold(held_by(name))
            peers.get(held_by(name))
        with pytest.raises(KVTransferError, match="all 2 are in use"):
            peers.get(held_by("c"))
        peers.get(held_by("a"))
        peers.close()

    asyncio.run(main())
    assert "all 2 are in use" in caplog.text


def test_table_stays_bounded_over_ten_thousand_peers() -> None:
    async def main() -> None:
        peers, ranks = small_table(MAX_PEERS)
        for number in range(10_000):
            remote = held_by(f"p{number}", port=1 + number % 60_000)
            peers.hold(remote)
            peers.get(remote).metadata = FACTS
            peers.forget_predecessors(remote)
            peers.release(remote)
        assert len(peers) == MAX_PEERS
        assert len(ranks.broadcasts) == 10_000 - MAX_PEERS
        assert len(peers._at_url) == len(peers._urls_of) == MAX_PEERS
        assert not peers._num_held
        peers.close()
        assert (len(peers), len(peers._at_url), len(peers._urls_of)) == (0, 0, 0)

    asyncio.run(main())


def test_two_thousand_concurrent_peers() -> None:
    """All are in use, so none is evicted for another."""

    async def main() -> None:
        peers, ranks = small_table(MAX_PEERS)
        remotes = [held_by(f"p{number}", port=1 + number) for number in range(2_000)]
        first = {}
        for remote in remotes:
            peers.hold(remote)
            first[remote.engine_id] = peers.get(remote)
        assert all(peers.get(remote) is first[remote.engine_id] for remote in remotes)
        assert ranks.broadcasts == []
        peers.close()

    asyncio.run(main())
