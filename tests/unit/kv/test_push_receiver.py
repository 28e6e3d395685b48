"""The decode side of push: messages that are early, late, repeated, wrong or from unknown peers."""

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
from mooncake_kv.metaserver_client import RequestMetaserver
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
from mooncake_kv.ranks import ConvertRopeOrder

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
        converts_rope_order=True,
    )


MAX_LOAD_S = 300.0


async def post_nowhere(metaserver: RequestMetaserver, params: KVTransferDict) -> None:
    """Post nothing."""


class ReceiverHarness:
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
        self.conversions: list[ConvertRopeOrder] = []
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
            context, self._inquire, post_nowhere, self._convert, max_load_s=MAX_LOAD_S
        )
        writer = facts("p-1", tp_size, hosts[0], rope_order)
        self.side.handle(Hello(1, PROTOCOL_VERSION, writer))

    def load(self, num_tokens: int = 10) -> None:
        params = {"num_prompt_tokens": 16 + num_tokens, "remote_cached_tokens": 16}
        self.side.load("r", (3, 7), RequestMetaserver("http://nowhere"), params)
        self.tasks.pop().close()  # the post to the metaserver, which does not exist

    def receive(self, message: AnyMessage) -> LeaseStatus:
        answer = self.side.handle(message)
        assert isinstance(answer, LeaseReply)
        assert answer.ticket == message.ticket
        return answer.status

    def open(self, writer: Writer = ONE) -> LeaseStatus:
        return self.receive(PushOpen(2, "r", writer))

    def pushed(self, *written: tuple[int, int, int], writer: Writer = ONE) -> LeaseStatus:
        return self.receive(Pushed(3, "r", writer, written, TOKEN))

    def failed(self, writer: Writer = ONE, *, may_still_arrive: bool = False) -> LeaseStatus:
        return self.receive(PushFailed(4, "r", writer, "broken", may_still_arrive))

    def reap(self, now: float) -> list[str | None]:
        """Reap, and run the tasks that this starts; returns the errors of ended loads."""
        self.now = now
        before = len(self.events)
        self.side.reap()
        for task in self.tasks:
            asyncio.run(task)
        self.tasks.clear()
        return [e.error for e in self.events[before:] if isinstance(e, LoadEnded)]

    async def _convert(self, order: ConvertRopeOrder) -> None:
        self.conversions.append(order)
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
def receiver() -> ReceiverHarness:
    return ReceiverHarness()


def test_complete_push_completes_load_with_first_token(receiver: ReceiverHarness) -> None:
    receiver.load()
    assert receiver.open() is LeaseStatus.HELD
    assert receiver.pushed((0, 0, 10 * TOKEN_BYTES)) is LeaseStatus.RELEASED
    assert receiver.events == [LoadEnded("r", None, FIRST)]
    assert receiver.side.counts.nbytes == 10 * TOKEN_BYTES
    assert receiver.received.snapshot() == {"p-1": 10 * TOKEN_BYTES}


def test_latents_of_another_order_are_converted_before_the_load_ends() -> None:
    receiver = ReceiverHarness(rope_order=PAIRS)
    receiver.load()
    receiver.open()
    assert receiver.pushed((0, 0, 10 * TOKEN_BYTES)) is LeaseStatus.RELEASED
    receiver.side.cancel("r")  # its blocks belong to the ranks until they are done
    assert (receiver.events, receiver.conversions) == ([], [])
    assert receiver.reap(0.0) == [None]
    assert receiver.conversions == [ConvertRopeOrder("r", (3, 7), 16, 26, PAIRS)]
    assert receiver.events == [LoadEnded("r", None, FIRST)]


def test_rank_that_cannot_reorder_latents_fails_the_load() -> None:
    receiver = ReceiverHarness(rope_order=PAIRS)
    receiver.load()
    receiver.open()
    receiver.pushed((0, 0, 10 * TOKEN_BYTES))
    receiver.turn_error = "rank 0: out of memory"
    assert receiver.reap(0.0) == ["rank 0: out of memory"]
    assert receiver.side.counts.failures == 1


def test_bytes_are_counted_for_most_recent_senders() -> None:
    received = BytesByPeer()
    for number in range(MAX_SENDERS + 1):
        received.add("oldest, and still sending", 1)
        received.add(f"p-{number}", 1)
    found = received.snapshot()
    assert len(found) == MAX_SENDERS
    assert found["oldest, and still sending"] == MAX_SENDERS + 1
    assert "p-1" not in found


def test_repeated_completion_gets_same_reply_and_changes_nothing(receiver: ReceiverHarness) -> None:
    receiver.load()
    receiver.open()
    answers = [receiver.pushed((0, 0, 10 * TOKEN_BYTES)) for _ in range(3)]
    assert answers == [LeaseStatus.RELEASED] * 3
    assert receiver.failed() is LeaseStatus.RELEASED
    assert len(receiver.events) == 1


def test_each_rank_accounts_for_its_own_bytes() -> None:
    receiver = ReceiverHarness(tp_size=2)
    receiver.load()
    receiver.open()
    half = 10 * TOKEN_BYTES // 2
    assert receiver.pushed((0, 0, half), (1, 0, half)) is LeaseStatus.RELEASED


@pytest.mark.parametrize(
    "written",
    [(), ((0, 0, 1),), ((0, 0, 11 * TOKEN_BYTES),), ((1, 0, 10 * TOKEN_BYTES),)],
    ids=["nothing", "too little", "too much", "another rank"],
)
def test_wrong_byte_count_fails_the_load(
    receiver: ReceiverHarness, written: tuple[tuple[int, int, int], ...]
) -> None:
    receiver.load()
    receiver.open()
    assert receiver.pushed(*written) is LeaseStatus.EXPIRED
    [ended] = receiver.events
    assert isinstance(ended, LoadEnded)
    assert "should be {(0, 0): 10240}" in str(ended.error)
    assert ended.is_drained


def test_failure_message_fails_load_with_its_reason(receiver: ReceiverHarness) -> None:
    receiver.load()
    receiver.open()
    assert receiver.failed() is LeaseStatus.EXPIRED
    assert receiver.failed() is LeaseStatus.EXPIRED
    assert receiver.events == [LoadEnded("r", "the prefill instance gave up: broken")]
    assert receiver.pushed((0, 0, 10 * TOKEN_BYTES)) is LeaseStatus.EXPIRED


def test_writer_that_fails_before_its_grant_ends_the_wait(receiver: ReceiverHarness) -> None:
    receiver.load()
    receiver.failed()
    assert receiver.events == [LoadEnded("r", "the prefill instance gave up: broken")]


def test_unadmitted_writers_cannot_complete_or_fail_a_load(receiver: ReceiverHarness) -> None:
    receiver.side.handle(Hello(1, PROTOCOL_VERSION, facts("p-2")))
    receiver.load()
    receiver.open()
    assert receiver.open(TWO) is LeaseStatus.EXPIRED
    assert receiver.failed(TWO) is LeaseStatus.UNKNOWN
    assert receiver.pushed((0, 0, 1), writer=TWO) is LeaseStatus.UNKNOWN
    assert not receiver.events
    assert receiver.pushed((0, 0, 10 * TOKEN_BYTES)) is LeaseStatus.RELEASED


def test_messages_about_unknown_requests_are_answered_and_harmless(
    receiver: ReceiverHarness,
) -> None:
    assert receiver.open() is LeaseStatus.UNKNOWN
    assert receiver.pushed() is LeaseStatus.UNKNOWN
    assert receiver.failed() is LeaseStatus.UNKNOWN
    receiver.side.cancel("r")
    assert not receiver.events


def test_writer_without_hello_is_rejected(receiver: ReceiverHarness) -> None:
    receiver.load()
    with pytest.raises(HandshakeRefused, match="send Hello"):
        receiver.open(TWO)


@pytest.mark.parametrize("sign", ["Hello", "PushOpen"])
def test_writers_are_evicted_least_recently_used_first(
    receiver: ReceiverHarness, sign: str
) -> None:
    others = count()

    def meet(how_many: int) -> None:
        for _ in range(how_many):
            receiver.side.handle(Hello(1, PROTOCOL_VERSION, facts(f"q-{next(others)}")))

    meet(MAX_WRITERS - 1)
    receiver.load()
    if sign == "Hello":
        receiver.side.handle(Hello(1, PROTOCOL_VERSION, facts("p-1")))
    else:
        assert receiver.open() is LeaseStatus.HELD
    meet(MAX_WRITERS - 1)
    assert receiver.open() is LeaseStatus.HELD
    assert receiver.pushed((0, 0, 10 * TOKEN_BYTES)) is LeaseStatus.RELEASED
    receiver.load()
    meet(MAX_WRITERS)
    with pytest.raises(HandshakeRefused, match="send Hello"):
        receiver.open()


def test_cancelled_load_without_a_writer_is_free_immediately(receiver: ReceiverHarness) -> None:
    receiver.load()
    receiver.side.cancel("r")
    receiver.side.cancel("r")
    assert [event.request_id for event in receiver.events if isinstance(event, LoadEnded)] == ["r"]
    assert receiver.open() is LeaseStatus.EXPIRED


def test_cancelled_load_is_drained_when_its_writer_reports_it(receiver: ReceiverHarness) -> None:
    receiver.load()
    receiver.open()
    receiver.side.cancel("r")
    assert not receiver.events
    assert receiver.side.handle(Renew(7, ("r",))) == Renewed(7, ("r",))
    assert receiver.pushed((0, 0, 10 * TOKEN_BYTES)) is LeaseStatus.EXPIRED
    [ended] = receiver.events
    assert isinstance(ended, LoadEnded)
    assert ended.is_drained
    assert ended.error is not None


def test_load_whose_request_has_ended_is_no_failure(caplog: pytest.LogCaptureFixture) -> None:
    """Nobody lacks its KV, however it ends."""
    for is_open in (False, True):
        receiver = ReceiverHarness(stops_writes_on_failure=False)
        other = msgspec.structs.replace(facts("p-1"), model_fingerprint="other")
        with pytest.raises(HandshakeRefused, match="model differs"):
            receiver.side.handle(Hello(1, PROTOCOL_VERSION, other))
        caplog.clear()
        receiver.load()
        if is_open:
            receiver.open()
        receiver.side.cancel("r")
        receiver.failed(may_still_arrive=True)
        receiver.reap(DRAIN_S)
        assert drains(receiver)[-1]
        assert (receiver.side.counts.transfers, receiver.side.counts.failures) == (1, 0)
        assert receiver.side.counts.refused == 0
        assert [each.message for each in caplog.records if each.levelno > logging.INFO] == []


def test_load_that_has_failed_before_its_request_ended_is_a_failure() -> None:
    receiver = ReceiverHarness(stops_writes_on_failure=False)
    receiver.load()
    receiver.open()
    receiver.failed(may_still_arrive=True)
    receiver.side.cancel("r")
    receiver.reap(DRAIN_S)
    receiver.load()
    receiver.open()
    receiver.failed()
    assert receiver.side.counts.failures == 2


def test_other_model_or_protocol_is_rejected(receiver: ReceiverHarness) -> None:
    with pytest.raises(HandshakeRefused, match="protocol 99"):
        receiver.side.handle(Hello(1, 99, facts("p-3")))
    answer = receiver.side.handle(Hello(1, PROTOCOL_VERSION, facts("p-3")))
    assert isinstance(answer, Welcome)


def test_failures_of_rejected_instances_are_counted(
    receiver: ReceiverHarness, caplog: pytest.LogCaptureFixture
) -> None:
    other = msgspec.structs.replace(facts("p-3"), model_fingerprint="other")
    for _ in range(2):
        with pytest.raises(HandshakeRefused, match="model differs"):
            receiver.side.handle(Hello(1, PROTOCOL_VERSION, other))
    receiver.load()
    receiver.failed(Writer("p-3", "c", "127.0.0.1", 3))
    receiver.load()
    receiver.failed(ONE)
    assert (receiver.side.counts.failures, receiver.side.counts.refused) == (2, 1)
    levels = [record.levelname for record in caplog.records if record.levelno >= logging.WARNING]
    assert levels == ["ERROR", "WARNING"], "the rejected peer once, and the other one's failure"


def test_messages_of_the_pull_connector_are_rejected(receiver: ReceiverHarness) -> None:
    answer = receiver.side.handle(Done(9, "r", "reader"))
    assert isinstance(answer, Reject)
    assert answer.ticket == 9


def test_reservation_without_a_writer_ends_after_a_lease(receiver: ReceiverHarness) -> None:
    receiver.load()
    assert receiver.reap(5.9) == []
    assert receiver.reap(6.0) == ["no prefill instance opened its push within 6 s"]
    assert receiver.open() is LeaseStatus.EXPIRED


def test_dead_writer_frees_its_blocks(receiver: ReceiverHarness) -> None:
    receiver.load()
    receiver.open()
    receiver.is_writer_dead = True
    assert receiver.reap(2.9) == []
    assert receiver.reap(3.0) == ["prefill instance p-1 is gone"]
    assert all(event.is_drained for event in receiver.events if isinstance(event, LoadEnded))


def drains(receiver: ReceiverHarness) -> list[bool]:
    return [event.is_drained for event in receiver.events if isinstance(event, LoadEnded)]


def test_in_flight_data_of_failed_writer_is_drained_unless_writes_end_with_it() -> None:
    receiver = ReceiverHarness(stops_writes_on_failure=False)
    receiver.load()
    receiver.open()
    assert receiver.failed(may_still_arrive=True) is LeaseStatus.EXPIRED
    assert receiver.failed(may_still_arrive=True) is LeaseStatus.EXPIRED
    assert drains(receiver) == [False]
    assert receiver.reap(DRAIN_S - 0.1) == []
    assert receiver.side.num_reserved == 1
    assert receiver.reap(DRAIN_S) == ["the prefill instance gave up: broken"]
    assert drains(receiver) == [False, True]
    assert receiver.side.num_reserved == 0
    assert receiver.side.counts.failures == 1


@pytest.mark.parametrize(
    ("stops_writes_on_failure", "may_still_arrive"), [(True, True), (False, False)]
)
def test_blocks_are_free_immediately_if_nothing_can_arrive(
    stops_writes_on_failure: bool, may_still_arrive: bool
) -> None:
    receiver = ReceiverHarness(stops_writes_on_failure=stops_writes_on_failure)
    receiver.load()
    receiver.open()
    receiver.failed(may_still_arrive=may_still_arrive)
    assert drains(receiver) == [True]


def test_cancelled_load_keeps_its_blocks_while_something_may_arrive() -> None:
    receiver = ReceiverHarness(stops_writes_on_failure=False)
    receiver.load()
    receiver.open()
    receiver.side.cancel("r")
    receiver.failed(may_still_arrive=True)
    assert drains(receiver) == [False]
    receiver.reap(DRAIN_S)
    assert drains(receiver) == [False, True]


@pytest.mark.parametrize(("tp_size", "stops_writes_on_failure"), [(1, False), (2, True)])
def test_in_flight_writes_of_dead_writer_are_drained(
    tp_size: int, stops_writes_on_failure: bool
) -> None:
    """If nothing stops them, and if its ranks are processes that may still be alive."""
    receiver = ReceiverHarness(tp_size, stops_writes_on_failure=stops_writes_on_failure)
    receiver.load()
    receiver.open()
    receiver.is_writer_dead = True
    assert receiver.reap(3.0) == ["prefill instance p-1 is gone"]
    assert drains(receiver) == [False]
    assert receiver.open() is LeaseStatus.EXPIRED
    receiver.reap(3.0 + DRAIN_S)
    assert drains(receiver) == [False, True]


@pytest.mark.parametrize("hosts", [("there", "here"), ("", "")], ids=str)
def test_refused_connection_by_other_host_does_not_prove_writer_dead(
    hosts: tuple[str, str],
) -> None:
    """A load balancer may refuse connections for a live writer, which stops when its lease
    expires."""
    receiver = ReceiverHarness(hosts=hosts)
    receiver.is_writer_near = False
    receiver.load()
    receiver.open()
    receiver.is_writer_dead = True
    assert receiver.reap(3.0) == ["prefill instance p-1 is gone"]
    assert drains(receiver) == [False]
    assert receiver.side.handle(Renew(9, ("r",))) == Renewed(9, ("r",)), (
        "if it is alive, it receives the reply"
    )
    assert receiver.reap(3.0 + LEASE_S + DRAIN_S - 0.1) == []
    receiver.reap(3.0 + LEASE_S + DRAIN_S)
    assert drains(receiver) == [False, True]
    assert receiver.side.num_reserved == 0


def test_complete_push_needs_no_drain() -> None:
    receiver = ReceiverHarness(stops_writes_on_failure=False)
    receiver.load()
    receiver.open()
    receiver.side.cancel("r")
    assert receiver.pushed((0, 0, 10 * TOKEN_BYTES)) is LeaseStatus.EXPIRED
    assert drains(receiver) == [True]


def test_silent_writer_frees_the_request_and_not_the_blocks(receiver: ReceiverHarness) -> None:
    receiver.load()
    receiver.open()
    assert receiver.reap(4.0) == []
    words = "prefill instance p-1 has been silent for longer than a lease"
    assert receiver.reap(7.0) == [words]
    assert [e.is_drained for e in receiver.events if isinstance(e, LoadEnded)] == [False]
    assert receiver.reap(60.0) == []
    assert receiver.side.num_reserved == 1
    receiver.failed()
    assert [e.is_drained for e in receiver.events if isinstance(e, LoadEnded)] == [False, True]
    assert receiver.side.counts.failures == 1


def test_writer_whose_host_is_unreachable_for_long_is_considered_dead() -> None:
    """The host neither answers nor refuses: a live writer would have stopped long ago."""
    receiver = ReceiverHarness(stops_writes_on_failure=False)
    receiver.load()
    receiver.open()
    receiver.is_host_gone = True
    assert receiver.reap(7.0) == ["prefill instance p-1 has been silent for longer than a lease"]
    assert drains(receiver) == [False]
    for second in (60.0, UNREACHABLE_S):
        assert receiver.reap(second) == []
    assert receiver.side.num_reserved == 1
    assert receiver.reap(UNREACHABLE_S + 3.0) == ["instance p-1 can't be reached, for 123 s"]
    assert drains(receiver) == [False, True]
    assert receiver.side.num_reserved == 0
    assert receiver.side.counts.failures == 1
    assert receiver.open() is LeaseStatus.EXPIRED


def test_stopped_writer_counts_as_unreachable_once_its_host_is_down() -> None:
    """While its kernel answers, a stopped process may continue and write."""
    receiver = ReceiverHarness()
    receiver.load()
    receiver.open()
    for second in (7.0, 500.0, 1000.0):
        receiver.reap(second)
    assert receiver.side.num_reserved == 1
    receiver.is_host_gone = True
    receiver.reap(1000.0 + UNREACHABLE_S)
    assert receiver.side.num_reserved == 1
    receiver.reap(1003.0 + UNREACHABLE_S)
    assert drains(receiver) == [False, True]


def test_writer_that_reports_progress_is_awaited(receiver: ReceiverHarness) -> None:
    receiver.load()
    receiver.open()
    receiver.reply = StatusReply(1, "p-1", ("a",), ())
    for second in (3.0, 6.0, 9.0, 12.0):
        assert receiver.reap(second) == []
    receiver.reply = None
    assert receiver.reap(15.0) == []
    assert receiver.reap(18.1) == ["prefill instance p-1 has been silent for longer than a lease"]


def test_requested_completion_counts_as_completion(receiver: ReceiverHarness) -> None:
    receiver.load()
    receiver.open()
    pushed = Pushed(1, "r", ONE, ((0, 0, 10 * TOKEN_BYTES),), TOKEN)
    receiver.reply = StatusReply(1, "p-1", (), (pushed,))
    assert receiver.reap(3.0) == [None]
    assert receiver.events == [LoadEnded("r", None, FIRST)]
    assert receiver.pushed((0, 0, 10 * TOKEN_BYTES)) is LeaseStatus.RELEASED


def test_completion_of_other_attempt_fails_the_load(receiver: ReceiverHarness) -> None:
    receiver.load()
    receiver.open()
    foreign = Pushed(1, "r", TWO, ((0, 0, 10 * TOKEN_BYTES),), TOKEN)
    receiver.reply = StatusReply(1, "p-1", (), (foreign,))
    assert receiver.reap(3.0) == ["prefill instance p-1 has no record of it any more"]


def test_live_writer_without_progress_is_not_awaited(receiver: ReceiverHarness) -> None:
    receiver.load()
    for second in range(0, int(MAX_LOAD_S) + 1, 2):
        receiver.now = float(second)
        receiver.open()
        assert receiver.reap(float(second)) == []
    assert receiver.reap(MAX_LOAD_S + 1) == ["its KV was not complete within 300 s"]
    assert receiver.side.handle(Renew(7, ("r",))) == Renewed(7, ("r",))


def test_writer_with_other_prompt_is_rejected(caplog: pytest.LogCaptureFixture) -> None:
    receiver = ReceiverHarness()
    params = {"num_prompt_tokens": 26, "remote_cached_tokens": 16, "prompt_digest": "ours"}
    receiver.side.load("r", (3, 7), RequestMetaserver("http://nowhere"), params)
    receiver.tasks.pop().close()
    for digest in ("theirs", ""):
        assert receiver.receive(PushOpen(2, "r", ONE, digest)) is LeaseStatus.EXPIRED
    assert "was given another prompt" in caplog.text
    assert receiver.receive(PushOpen(2, "r", ONE, "ours")) is LeaseStatus.HELD
