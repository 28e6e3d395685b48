"""The decode side of push: messages that are early, late, repeated, wrong or from strangers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from itertools import count
from typing import Any

import msgspec
import pytest

from mooncake_hal.deployment import Hardware
from mooncake_hal.kv.geometry import AttentionKind, KVGeometry, shard_of
from mooncake_hal.kv.layout import make_layout
from mooncake_hal.latents import HALVES, PAIRS
from mooncake_kv.connector import Event, LoadEnded
from mooncake_kv.connector_scheduler import MAX_SENDERS, BytesByPeer, ConnectorContext
from mooncake_kv.errors import (
    HandshakeRefused,
    KVTransferError,
    PeerAbsent,
    PeerGone,
    PeerUnreachable,
)
from mooncake_kv.handshake import InstanceMetadata, RankMetadata
from mooncake_kv.metaserver_client import Metaserver
from mooncake_kv.numerics import ROPE_ORDER, Numerics
from mooncake_kv.params import FirstToken, FirstTokenLogprobs, KVTransferDict
from mooncake_kv.protocol import (
    PROTOCOL_VERSION,
    AnyMessage,
    Done,
    Hello,
    LeaseReply,
    LeaseStatus,
    Pushed,
    PushFailed,
    PushOpen,
    Reject,
    Renew,
    Renewed,
    StatusReply,
    Welcome,
    Writer,
)
from mooncake_kv.push_receiver import MAX_WRITERS, UNREACHABLE_S, PushReceiver
from mooncake_kv.ranks import TurnRope

GEOMETRY = KVGeometry(AttentionKind.GQA, 2, 4, (16, 16), "float32", 4)
TOKEN_BYTES = 2 * 4 * 32 * 4
LEASE_S = 6.0
DRAIN_S = 20.0
ONE = Writer("p-1", "a", "127.0.0.1", 1)
TWO = Writer("p-2", "b", "127.0.0.1", 2)
TOKEN = FirstToken(5, (-0.5, ((5, -0.5), (6, -1.5))), 16)
FIRST = FirstToken(5, FirstTokenLogprobs(-0.5, ((5, -0.5), (6, -1.5))), 16)


def facts(
    engine_id: str, tp_size: int = 1, host: str = "here", rope_order: str = HALVES
) -> InstanceMetadata:
    ranks = []
    for rank in range(tp_size):
        shard = shard_of(GEOMETRY, tp_size, rank)
        ranks.append(RankMetadata(shard, make_layout("BHLPT", GEOMETRY, shard, 8, 16), {}))
    hardware = Hardware("cpu", "x86")
    return InstanceMetadata(
        engine_id,
        "m",
        "t",
        GEOMETRY,
        16,
        hardware,
        tuple(ranks),
        host,
        numerics=Numerics({ROPE_ORDER: rope_order}),
        turns_rope=True,
    )


MAX_LOAD_S = 300.0


async def post_nowhere(metaserver: Metaserver, params: KVTransferDict) -> None:
    """Post nothing."""


class Desk:
    """A decode side whose tasks run on demand, and whose events are recorded."""

    def __init__(
        self,
        tp_size: int = 1,
        *,
        stops_writes_on_failure: bool = True,
        hosts: tuple[str, str] = ("here", "here"),
        rope_order: str = HALVES,
    ) -> None:
        self.events: list[Event] = []
        self.tasks: list[Coroutine[Any, Any, None]] = []
        self.is_writer_dead = False
        self.is_writer_near = True
        self.is_host_gone = False
        self.reply: StatusReply | None = None
        self.turns: list[TurnRope] = []
        self.turn_error: str | None = None
        self.now = 0.0
        context = ConnectorContext(
            facts("d", host=hosts[1]),
            LEASE_S,
            self.events.append,
            self._keep,
            stops_writes_on_failure=stops_writes_on_failure,
            drain_s=DRAIN_S,
            clock=lambda: self.now,
        )
        self.received = context.received
        self.side = PushReceiver(
            context, self._inquire, post_nowhere, self._turn, max_load_s=MAX_LOAD_S
        )
        writer = facts("p-1", tp_size, hosts[0], rope_order)
        self.side.handle(Hello(1, PROTOCOL_VERSION, writer))

    def load(self, num_tokens: int = 10) -> None:
        params = {"num_prompt_tokens": 16 + num_tokens, "remote_cached_tokens": 16}
        self.side.load("r", (3, 7), Metaserver("http://nowhere"), params)
        self.tasks.pop().close()  # the post to the metaserver, which does not exist

    def say(self, message: AnyMessage) -> LeaseStatus:
        answer = self.side.handle(message)
        assert isinstance(answer, LeaseReply)
        assert answer.ticket == message.ticket
        return answer.status

    def open(self, writer: Writer = ONE) -> LeaseStatus:
        return self.say(PushOpen(2, "r", writer))

    def pushed(self, *written: tuple[int, int, int], writer: Writer = ONE) -> LeaseStatus:
        return self.say(Pushed(3, "r", writer, written, TOKEN))

    def failed(self, writer: Writer = ONE, *, may_land: bool = False) -> LeaseStatus:
        return self.say(PushFailed(4, "r", writer, "broken", may_land))

    def reap(self, now: float) -> list[str | None]:
        """Reap, and run the tasks that this starts; returns the errors of ended loads."""
        self.now = now
        before = len(self.events)
        self.side.reap()
        for task in self.tasks:
            asyncio.run(task)
        self.tasks.clear()
        return [e.error for e in self.events[before:] if isinstance(e, LoadEnded)]

    async def _turn(self, order: TurnRope) -> None:
        self.turns.append(order)
        if self.turn_error is not None:
            raise KVTransferError(self.turn_error)

    def _keep(self, task: Coroutine[Any, Any, None], request_id: str | None = None) -> Any:
        self.tasks.append(task)

    async def _inquire(self, writer: Writer, names: list[str], is_local: bool) -> StatusReply:
        assert (writer, names, is_local) == (ONE, ["a"], self.is_writer_near)
        if self.is_writer_dead:
            raise (PeerGone if is_local else PeerAbsent)("prefill instance p-1 is gone")
        if self.is_host_gone:
            raise PeerUnreachable("instance p-1 can't be reached")
        if self.reply is None:
            raise KVTransferError("no answer")
        return self.reply


@pytest.fixture
def desk() -> Desk:
    return Desk()


def test_complete_push_completes_load_with_first_token(desk: Desk) -> None:
    desk.load()
    assert desk.open() is LeaseStatus.HELD
    assert desk.pushed((0, 0, 10 * TOKEN_BYTES)) is LeaseStatus.RELEASED
    assert desk.events == [LoadEnded("r", None, FIRST)]
    assert desk.side.counts.nbytes == 10 * TOKEN_BYTES
    assert desk.received.snapshot() == {"p-1": 10 * TOKEN_BYTES}


def test_latents_of_another_order_are_converted_before_the_load_ends() -> None:
    desk = Desk(rope_order=PAIRS)
    desk.load()
    desk.open()
    assert desk.pushed((0, 0, 10 * TOKEN_BYTES)) is LeaseStatus.RELEASED
    desk.side.cancel("r")  # its blocks belong to the ranks until they are done
    assert (desk.events, desk.turns) == ([], [])
    assert desk.reap(0.0) == [None]
    assert desk.turns == [TurnRope("r", (3, 7), 16, 26, PAIRS)]
    assert desk.events == [LoadEnded("r", None, FIRST)]


def test_rank_that_cannot_reorder_latents_fails_the_load() -> None:
    desk = Desk(rope_order=PAIRS)
    desk.load()
    desk.open()
    desk.pushed((0, 0, 10 * TOKEN_BYTES))
    desk.turn_error = "rank 0: out of memory"
    assert desk.reap(0.0) == ["rank 0: out of memory"]
    assert desk.side.counts.failures == 1


def test_bytes_are_counted_for_most_recent_senders() -> None:
    received = BytesByPeer()
    for number in range(MAX_SENDERS + 1):
        received.add("oldest, and still sending", 1)
        received.add(f"p-{number}", 1)
    found = received.snapshot()
    assert len(found) == MAX_SENDERS
    assert found["oldest, and still sending"] == MAX_SENDERS + 1
    assert "p-1" not in found


def test_repeated_completion_gets_same_reply_and_changes_nothing(desk: Desk) -> None:
    desk.load()
    desk.open()
    answers = [desk.pushed((0, 0, 10 * TOKEN_BYTES)) for _ in range(3)]
    assert answers == [LeaseStatus.RELEASED] * 3
    assert desk.failed() is LeaseStatus.RELEASED
    assert len(desk.events) == 1


def test_each_rank_accounts_for_its_own_bytes() -> None:
    desk = Desk(tp_size=2)
    desk.load()
    desk.open()
    half = 10 * TOKEN_BYTES // 2
    assert desk.pushed((0, 0, half), (1, 0, half)) is LeaseStatus.RELEASED


@pytest.mark.parametrize(
    "written",
    [(), ((0, 0, 1),), ((0, 0, 11 * TOKEN_BYTES),), ((1, 0, 10 * TOKEN_BYTES),)],
    ids=["nothing", "too little", "too much", "another rank"],
)
def test_wrong_byte_count_fails_the_load(
    desk: Desk, written: tuple[tuple[int, int, int], ...]
) -> None:
    desk.load()
    desk.open()
    assert desk.pushed(*written) is LeaseStatus.EXPIRED
    [ended] = desk.events
    assert isinstance(ended, LoadEnded)
    assert "should be {(0, 0): 10240}" in str(ended.error)
    assert ended.is_drained


def test_failure_message_fails_load_with_its_reason(desk: Desk) -> None:
    desk.load()
    desk.open()
    assert desk.failed() is LeaseStatus.EXPIRED
    assert desk.failed() is LeaseStatus.EXPIRED
    assert desk.events == [LoadEnded("r", "the prefill instance gave up: broken")]
    assert desk.pushed((0, 0, 10 * TOKEN_BYTES)) is LeaseStatus.EXPIRED


def test_a_writer_that_fails_before_its_grant_ends_the_wait(desk: Desk) -> None:
    desk.load()
    desk.failed()
    assert desk.events == [LoadEnded("r", "the prefill instance gave up: broken")]


def test_unadmitted_writers_cannot_complete_or_fail_a_load(desk: Desk) -> None:
    desk.side.handle(Hello(1, PROTOCOL_VERSION, facts("p-2")))
    desk.load()
    desk.open()
    assert desk.open(TWO) is LeaseStatus.EXPIRED
    assert desk.failed(TWO) is LeaseStatus.UNKNOWN
    assert desk.pushed((0, 0, 1), writer=TWO) is LeaseStatus.UNKNOWN
    assert not desk.events
    assert desk.pushed((0, 0, 10 * TOKEN_BYTES)) is LeaseStatus.RELEASED


def test_messages_about_unknown_requests_are_answered_and_harmless(desk: Desk) -> None:
    assert desk.open() is LeaseStatus.UNKNOWN
    assert desk.pushed() is LeaseStatus.UNKNOWN
    assert desk.failed() is LeaseStatus.UNKNOWN
    desk.side.cancel("r")
    assert not desk.events


def test_a_writer_that_has_not_sent_hello_is_refused(desk: Desk) -> None:
    desk.load()
    with pytest.raises(HandshakeRefused, match="send Hello"):
        desk.open(TWO)


@pytest.mark.parametrize("sign", ["Hello", "PushOpen"])
def test_writers_are_evicted_least_recently_used_first(desk: Desk, sign: str) -> None:
    others = count()

    def meet(how_many: int) -> None:
        for _ in range(how_many):
            desk.side.handle(Hello(1, PROTOCOL_VERSION, facts(f"q-{next(others)}")))

    meet(MAX_WRITERS - 1)
    desk.load()
    if sign == "Hello":
        desk.side.handle(Hello(1, PROTOCOL_VERSION, facts("p-1")))
    else:
        assert desk.open() is LeaseStatus.HELD
    meet(MAX_WRITERS - 1)
    assert desk.open() is LeaseStatus.HELD
    assert desk.pushed((0, 0, 10 * TOKEN_BYTES)) is LeaseStatus.RELEASED
    desk.load()
    meet(MAX_WRITERS)
    with pytest.raises(HandshakeRefused, match="send Hello"):
        desk.open()


def test_a_cancelled_load_without_a_writer_is_free_immediately(desk: Desk) -> None:
    desk.load()
    desk.side.cancel("r")
    desk.side.cancel("r")
    assert [event.request_id for event in desk.events if isinstance(event, LoadEnded)] == ["r"]
    assert desk.open() is LeaseStatus.EXPIRED


def test_a_cancelled_load_is_drained_when_its_writer_reports_it(desk: Desk) -> None:
    desk.load()
    desk.open()
    desk.side.cancel("r")
    assert not desk.events
    assert desk.side.handle(Renew(7, ("r",))) == Renewed(7, ("r",))
    assert desk.pushed((0, 0, 10 * TOKEN_BYTES)) is LeaseStatus.EXPIRED
    [ended] = desk.events
    assert isinstance(ended, LoadEnded)
    assert ended.is_drained
    assert ended.error is not None


def test_another_model_or_protocol_is_refused(desk: Desk) -> None:
    with pytest.raises(HandshakeRefused, match="protocol 99"):
        desk.side.handle(Hello(1, 99, facts("p-3")))
    answer = desk.side.handle(Hello(1, PROTOCOL_VERSION, facts("p-3")))
    assert isinstance(answer, Welcome)


def test_failures_of_refused_instances_are_counted(
    desk: Desk, caplog: pytest.LogCaptureFixture
) -> None:
    stranger = msgspec.structs.replace(facts("p-3"), model_fingerprint="other")
    for _ in range(2):
        with pytest.raises(HandshakeRefused, match="model differs"):
            desk.side.handle(Hello(1, PROTOCOL_VERSION, stranger))
    desk.load()
    desk.failed(Writer("p-3", "c", "127.0.0.1", 3))
    desk.load()
    desk.failed(ONE)
    assert (desk.side.counts.failures, desk.side.counts.refused) == (2, 1)
    levels = [record.levelname for record in caplog.records if record.levelno >= logging.WARNING]
    assert levels == ["ERROR", "WARNING"], "the rejected peer once, and the other one's failure"


def test_messages_of_the_pull_connector_are_rejected(desk: Desk) -> None:
    answer = desk.side.handle(Done(9, "r", "reader"))
    assert isinstance(answer, Reject)
    assert answer.ticket == 9


def test_a_reservation_without_a_writer_ends_after_a_lease(desk: Desk) -> None:
    desk.load()
    assert desk.reap(5.9) == []
    assert desk.reap(6.0) == ["no prefill instance opened its push within 6 s"]
    assert desk.open() is LeaseStatus.EXPIRED


def test_a_dead_writer_frees_its_blocks(desk: Desk) -> None:
    desk.load()
    desk.open()
    desk.is_writer_dead = True
    assert desk.reap(2.9) == []
    assert desk.reap(3.0) == ["prefill instance p-1 is gone"]
    assert all(event.is_drained for event in desk.events if isinstance(event, LoadEnded))


def drains(desk: Desk) -> list[bool]:
    return [event.is_drained for event in desk.events if isinstance(event, LoadEnded)]


def test_in_flight_data_of_failed_writer_is_drained_unless_writes_end_with_it() -> None:
    desk = Desk(stops_writes_on_failure=False)
    desk.load()
    desk.open()
    assert desk.failed(may_land=True) is LeaseStatus.EXPIRED
    assert desk.failed(may_land=True) is LeaseStatus.EXPIRED
    assert drains(desk) == [False]
    assert desk.reap(DRAIN_S - 0.1) == []
    assert desk.side.num_reserved == 1
    assert desk.reap(DRAIN_S) == ["the prefill instance gave up: broken"]
    assert drains(desk) == [False, True]
    assert desk.side.num_reserved == 0
    assert desk.side.counts.failures == 1


@pytest.mark.parametrize(("stops_writes_on_failure", "may_land"), [(True, True), (False, False)])
def test_blocks_are_free_immediately_if_nothing_can_arrive(
    stops_writes_on_failure: bool, may_land: bool
) -> None:
    desk = Desk(stops_writes_on_failure=stops_writes_on_failure)
    desk.load()
    desk.open()
    desk.failed(may_land=may_land)
    assert drains(desk) == [True]


def test_a_cancelled_load_keeps_its_blocks_while_something_may_arrive() -> None:
    desk = Desk(stops_writes_on_failure=False)
    desk.load()
    desk.open()
    desk.side.cancel("r")
    desk.failed(may_land=True)
    assert drains(desk) == [False]
    desk.reap(DRAIN_S)
    assert drains(desk) == [False, True]


@pytest.mark.parametrize(("tp_size", "stops_writes_on_failure"), [(1, False), (2, True)])
def test_in_flight_writes_of_dead_writer_are_drained(
    tp_size: int, stops_writes_on_failure: bool
) -> None:
    """If nothing stops them, and if its ranks are processes that may still be alive."""
    desk = Desk(tp_size, stops_writes_on_failure=stops_writes_on_failure)
    desk.load()
    desk.open()
    desk.is_writer_dead = True
    assert desk.reap(3.0) == ["prefill instance p-1 is gone"]
    assert drains(desk) == [False]
    assert desk.open() is LeaseStatus.EXPIRED
    desk.reap(3.0 + DRAIN_S)
    assert drains(desk) == [False, True]


@pytest.mark.parametrize("hosts", [("there", "here"), ("", "")], ids=str)
def test_refused_connection_by_other_host_does_not_prove_writer_dead(
    hosts: tuple[str, str],
) -> None:
    """A load balancer may refuse connections for a live writer, which stops when its lease
    expires."""
    desk = Desk(hosts=hosts)
    desk.is_writer_near = False
    desk.load()
    desk.open()
    desk.is_writer_dead = True
    assert desk.reap(3.0) == ["prefill instance p-1 is gone"]
    assert drains(desk) == [False]
    assert desk.side.handle(Renew(9, ("r",))) == Renewed(9, ("r",)), (
        "if it is alive, it receives the reply"
    )
    assert desk.reap(3.0 + LEASE_S + DRAIN_S - 0.1) == []
    desk.reap(3.0 + LEASE_S + DRAIN_S)
    assert drains(desk) == [False, True]
    assert desk.side.num_reserved == 0


def test_a_complete_push_needs_no_drain() -> None:
    desk = Desk(stops_writes_on_failure=False)
    desk.load()
    desk.open()
    desk.side.cancel("r")
    assert desk.pushed((0, 0, 10 * TOKEN_BYTES)) is LeaseStatus.EXPIRED
    assert drains(desk) == [True]


def test_a_silent_writer_frees_the_request_and_not_the_blocks(desk: Desk) -> None:
    desk.load()
    desk.open()
    assert desk.reap(4.0) == []
    words = "prefill instance p-1 has been silent for longer than a lease"
    assert desk.reap(7.0) == [words]
    assert [e.is_drained for e in desk.events if isinstance(e, LoadEnded)] == [False]
    assert desk.reap(60.0) == []
    assert desk.side.num_reserved == 1
    desk.failed()
    assert [e.is_drained for e in desk.events if isinstance(e, LoadEnded)] == [False, True]
    assert desk.side.counts.failures == 1


def test_a_writer_whose_host_is_unreachable_for_long_is_considered_dead() -> None:
    """The host neither answers nor refuses: a live writer would have stopped long ago."""
    desk = Desk(stops_writes_on_failure=False)
    desk.load()
    desk.open()
    desk.is_host_gone = True
    assert desk.reap(7.0) == ["prefill instance p-1 has been silent for longer than a lease"]
    assert drains(desk) == [False]
    for second in (60.0, UNREACHABLE_S):
        assert desk.reap(second) == []
    assert desk.side.num_reserved == 1
    assert desk.reap(UNREACHABLE_S + 3.0) == ["instance p-1 can't be reached, for 123 s"]
    assert drains(desk) == [False, True]
    assert desk.side.num_reserved == 0
    assert desk.side.counts.failures == 1
    assert desk.open() is LeaseStatus.EXPIRED


def test_stopped_writer_counts_as_unreachable_once_its_host_is_down() -> None:
    """While its kernel answers, a stopped process may continue and write."""
    desk = Desk()
    desk.load()
    desk.open()
    for second in (7.0, 500.0, 1000.0):
        desk.reap(second)
    assert desk.side.num_reserved == 1
    desk.is_host_gone = True
    desk.reap(1000.0 + UNREACHABLE_S)
    assert desk.side.num_reserved == 1
    desk.reap(1003.0 + UNREACHABLE_S)
    assert drains(desk) == [False, True]


def test_writer_that_reports_progress_is_awaited(desk: Desk) -> None:
    desk.load()
    desk.open()
    desk.reply = StatusReply(1, "p-1", ("a",), ())
    for second in (3.0, 6.0, 9.0, 12.0):
        assert desk.reap(second) == []
    desk.reply = None
    assert desk.reap(15.0) == []
    assert desk.reap(18.1) == ["prefill instance p-1 has been silent for longer than a lease"]


def test_requested_completion_counts_as_completion(desk: Desk) -> None:
    desk.load()
    desk.open()
    pushed = Pushed(1, "r", ONE, ((0, 0, 10 * TOKEN_BYTES),), TOKEN)
    desk.reply = StatusReply(1, "p-1", (), (pushed,))
    assert desk.reap(3.0) == [None]
    assert desk.events == [LoadEnded("r", None, FIRST)]
    assert desk.pushed((0, 0, 10 * TOKEN_BYTES)) is LeaseStatus.RELEASED


def test_completion_of_other_attempt_fails_the_load(desk: Desk) -> None:
    desk.load()
    desk.open()
    foreign = Pushed(1, "r", TWO, ((0, 0, 10 * TOKEN_BYTES),), TOKEN)
    desk.reply = StatusReply(1, "p-1", (), (foreign,))
    assert desk.reap(3.0) == ["prefill instance p-1 has no record of it any more"]


def test_live_writer_without_progress_is_not_awaited(desk: Desk) -> None:
    desk.load()
    for second in range(0, int(MAX_LOAD_S) + 1, 2):
        desk.now = float(second)
        desk.open()
        assert desk.reap(float(second)) == []
    assert desk.reap(MAX_LOAD_S + 1) == ["its KV was not complete within 300 s"]
    assert desk.side.handle(Renew(7, ("r",))) == Renewed(7, ("r",))


def test_writer_with_other_prompt_is_rejected(caplog: pytest.LogCaptureFixture) -> None:
    desk = Desk()
    params = {"num_prompt_tokens": 26, "remote_cached_tokens": 16, "prompt_digest": "ours"}
    desk.side.load("r", (3, 7), Metaserver("http://nowhere"), params)
    desk.tasks.pop().close()
    for digest in ("theirs", ""):
        assert desk.say(PushOpen(2, "r", ONE, digest)) is LeaseStatus.EXPIRED
    assert "was given another prompt" in caplog.text
    assert desk.say(PushOpen(2, "r", ONE, "ours")) is LeaseStatus.HELD
