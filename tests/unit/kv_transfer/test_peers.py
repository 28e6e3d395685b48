"""The book of peers: who is asked where, and who hears of it when one is given up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import zmq.asyncio

from mooncake_engine.errors import HandshakeRefused, KVTransferError
from mooncake_engine.kv_transfer.facts import InstanceFacts
from mooncake_engine.kv_transfer.params import RemoteKV
from mooncake_engine.kv_transfer.peers import IDLE_S, Peer, PeerBook
from mooncake_engine.kv_transfer.rank_messages import ConnectPeer, ForgetPeer
from mooncake_engine.kv_transfer.refusals import Refusals
from mooncake_hal.deployment import Hardware
from mooncake_hal.kv.geometry import AttentionKind, KVGeometry

FACTS = InstanceFacts(
    "a",
    "model",
    "tokenizer",
    KVGeometry(AttentionKind.GQA, 2, 4, (16, 16), "float32", 4),
    16,
    Hardware("cpu", "x86_64"),
    (),
)


class Ranks:
    """Remember what they are told."""

    def __init__(self) -> None:
        self.told: list[ConnectPeer | ForgetPeer] = []

    def tell_all(self, message: ConnectPeer | ForgetPeer) -> None:
        self.told.append(message)


def held_by(engine_id: str, port: int = 5000) -> RemoteKV:
    return RemoteKV(engine_id, "request", "127.0.0.1", port, (0,), 3)


def run(scenario: Callable[[PeerBook, Ranks], Coroutine[Any, Any, None]]) -> None:
    """Run a scenario with an empty book."""

    async def main() -> None:
        context, ranks = zmq.asyncio.Context(), Ranks()
        spawn = asyncio.ensure_future
        book = PeerBook(context, b"", ranks, spawn, lambda own, peer: None, Refusals())
        await scenario(book, ranks)
        book.close()
        await asyncio.sleep(0)
        context.destroy(linger=0)

    asyncio.run(main())


def test_a_peer_is_one_incarnation_at_one_address() -> None:
    async def scenario(book: PeerBook, ranks: Ranks) -> None:
        first = book.get(held_by("a"))
        assert book.get(held_by("a")) is first
        assert book.get(held_by("a", port=5001)) is not first
        assert book.get(held_by("b")) is not first

    run(scenario)


def test_a_wrong_address_that_is_given_up_leaves_the_right_one() -> None:
    async def scenario(book: PeerBook, ranks: Ranks) -> None:
        right, wrong = held_by("a"), held_by("a", port=5001)
        peer = book.get(right)
        peer.facts = FACTS
        book.get(wrong)
        book.forget(wrong, "nobody there")
        assert book.get(right) is peer
        assert ranks.told == []
        book.forget(right, "gone")
        book.forget(right, "gone")
        assert ranks.told == [ForgetPeer("a")]
        assert book.get(right) is not peer

    run(scenario)


def test_only_predecessors_at_the_same_address_are_dropped() -> None:
    async def scenario(book: PeerBook, ranks: Ranks) -> None:
        old, elsewhere, new = held_by("old"), held_by("other", port=5001), held_by("new")
        stale, other, current = book.get(old), book.get(elsewhere), book.get(new)
        stale.facts = FACTS
        book.forget_predecessors(new)
        assert ranks.told == [ForgetPeer("old")]
        assert book.get(new) is current
        assert book.get(elsewhere) is other
        assert book.get(old) is not stale

    run(scenario)


def test_a_peer_that_is_not_needed_any_more_is_dropped() -> None:
    """It may have gone for good, while there was nothing to notice that by."""

    async def scenario(book: PeerBook, ranks: Ranks) -> None:
        began = asyncio.get_running_loop().time()
        peer = book.get(held_by("a"))
        peer.facts = FACTS
        book.forget_idle(began + IDLE_S)
        assert book.get(held_by("a")) is peer
        assert ranks.told == []
        book.forget_idle(asyncio.get_running_loop().time() + IDLE_S + 1.0)
        assert ranks.told == [ForgetPeer("a")]
        assert book.get(held_by("a")) is not peer

    run(scenario)


def test_who_waits_for_a_peer_that_is_given_up_is_told_why() -> None:
    async def scenario(book: PeerBook, ranks: Ranks) -> None:
        remote = held_by("a", port=1)
        waiting = asyncio.ensure_future(book.get(remote).failed("request", "no use"))
        await asyncio.sleep(0)
        book.forget(remote, "it is silent")
        with pytest.raises(KVTransferError, match="was given up: it is silent"):
            await waiting

    run(scenario)


class Refuser:
    """A side channel on which every question is turned down."""

    def __init__(self) -> None:
        self.num_asked = 0

    async def ask(self, *_: Any) -> Any:
        self.num_asked += 1
        raise HandshakeRefused("model differs")


def test_hands_that_were_refused_are_not_offered_again() -> None:
    """Facts don't change in an incarnation's life."""

    async def main() -> None:
        client: Any = Refuser()
        refusals = Refusals()
        peer = Peer("a", client, lambda own, peer: None, refusals)
        for _ in range(3):
            with pytest.raises(HandshakeRefused, match=r"^model differs$"):
                await peer.shake_hands(FACTS, Ranks())
        assert client.num_asked == 1
        assert "a" in refusals

    asyncio.run(main())
