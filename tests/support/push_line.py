"""Both halves of the push connector, connected by a lossy line; everything else is simulated.

Runs in virtual time (``support.virtual_time``). The simulated ranks keep only their contract: one
report per push, and no byte written after it.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from support.virtual_time import SpawnedTasks

from mooncake_hal.deployment import Hardware
from mooncake_hal.kv.geometry import AttentionKind, KVGeometry, shard_of
from mooncake_hal.kv.layout import make_layout
from mooncake_kv.connector import Event, LeaseEnded, LoadEnded
from mooncake_kv.connector_scheduler import ConnectorContext
from mooncake_kv.errors import HandshakeRefused, KVTransferError, PeerAbsent, PeerGone
from mooncake_kv.handshake import InstanceMetadata, RankMetadata
from mooncake_kv.metaserver_client import RequestMetaserver
from mooncake_kv.params import KVTransferDict, PushTarget, RemoteKV
from mooncake_kv.protocol import (
    PROTOCOL_VERSION,
    AnyMessage,
    FirstToken,
    Hello,
    Reject,
    Renew,
    Renewed,
    StatusReply,
    StatusRequest,
    Writer,
)
from mooncake_kv.push_receiver import PushReceiver
from mooncake_kv.push_sender import PushSender
from mooncake_kv.ranks import (
    ConvertRopeOrder,
    EndPush,
    PushReport,
    RankGroup,
    StartPush,
    StopPush,
    decode_to_rank,
)

GEOMETRY = KVGeometry(AttentionKind.GQA, 2, 4, (16, 16), "float32", 4)
TOKEN_BYTES = 2 * 4 * 32 * 4
NUM_TOKENS = 10
TOKEN = FirstToken(5, None, 0)
TRY_S = 2.0
TRIES = 3
DRAIN_S = 1.0
LOAD_S = 300.0
"""Upper limit of the time that a rank of ``p`` takes to end a write."""
P_ADDRESS = ("p", 1)
D_ADDRESS = ("d", 2)

Delivery = Callable[[str], float | None]
"""Maps a message's kind to its delay in seconds; None loses the message."""


def metadata_of(engine_id: str) -> InstanceMetadata:
    """Metadata of an instance with one rank."""
    shard = shard_of(GEOMETRY, 1, 0)
    rank = RankMetadata(shard, make_layout("BHLPT", GEOMETRY, shard, 8, 16), {})
    return InstanceMetadata(engine_id, "m", "t", GEOMETRY, 16, Hardware("cpu", "x86"), (rank,))


async def convert_nothing(order: ConvertRopeOrder) -> None:
    """Never called: both sides keep latents in the same layout."""
    raise AssertionError(order)


def deliver(kind: str) -> float | None:
    """Deliver every message at once."""
    return 0.0


def dropping(*kinds: str) -> Delivery:
    """Lose the messages of these kinds and deliver all others at once."""
    return lambda kind: None if kind in kinds else 0.0


def unreliable(seed: int) -> Delivery:
    """Lose two of three messages and delay the rest, but no handshake: nothing would start."""
    numbers = random.Random(seed)

    def delivery(kind: str) -> float | None:
        is_lost = kind not in ("Hello", "Welcome") and numbers.random() < 0.67
        return None if is_lost else numbers.uniform(0.0, 3.0)

    return delivery


@dataclass
class Line:
    """A simulated side channel. With ``is_cut`` it behaves like a host that is down."""

    delivery: Delivery = deliver
    is_cut: bool = False

    async def ask(
        self,
        handle: Callable[[AnyMessage], AnyMessage],
        make: Callable[[int], AnyMessage],
        tries: int = TRIES,
        try_timeout_s: float | None = None,
    ) -> AnyMessage:
        """As ``SideChannelClient.ask``: repeats the question until an answer, even a late one."""
        answer: asyncio.Future[AnyMessage] = asyncio.get_running_loop().create_future()
        for _ in range(tries):
            self._send(make(1), lambda question: self._answer(handle, question, answer))
            done, _pending = await asyncio.wait({answer}, timeout=try_timeout_s or TRY_S)
            if done:
                return answer.result()
        raise KVTransferError("no answer")

    def _answer(
        self,
        handle: Callable[[AnyMessage], AnyMessage],
        question: AnyMessage,
        answer: asyncio.Future[AnyMessage],
    ) -> None:
        try:
            said = handle(question)
        except HandshakeRefused as exc:
            said = Reject(question.ticket, str(exc))
        self._send(said, lambda message: answer.done() or answer.set_result(message))

    def _send(self, message: AnyMessage, receive: Callable[[AnyMessage], object]) -> None:
        delay = None if self.is_cut else self.delivery(type(message).__name__)
        if delay is not None:
            asyncio.get_running_loop().call_later(delay, receive, message)


class RankOfOne:
    """A prefill instance's only rank: writes while it may, then reports once."""

    def __init__(self, numbers: random.Random) -> None:
        self.writing: set[str] = set()
        self.report: Callable[[int, PushReport], None]
        self._numbers = numbers
        self._ends: set[str] = set()
        self._reported: set[str] = set()

    def send(self, rank: int, message: bytes) -> None:
        """Handle a message from the core."""
        order = decode_to_rank(message)
        assert isinstance(order, StartPush | StopPush | EndPush)
        name = order.request_id
        if isinstance(order, StartPush):
            self.writing.add(name)
        if isinstance(order, StopPush) or (isinstance(order, EndPush) and not order.is_complete):
            self._finish(name, "stopped")
        if isinstance(order, EndPush) and order.is_complete:
            self._ends.add(name)
        if name in self._ends & self.writing:
            self._finish(name, None)

    def _finish(self, name: str, error: str | None) -> None:
        delay = self._numbers.uniform(0.0, DRAIN_S)
        asyncio.get_running_loop().call_later(delay, self._drained, name, error)

    def _drained(self, name: str, error: str | None) -> None:
        if name not in self._reported:
            self._reported.add(name)
            self.writing.discard(name)
            written = {} if error else {0: NUM_TOKENS * TOKEN_BYTES}
            self.report(0, PushReport(name, error, written, 0.1))


@dataclass
class Pair:
    """A prefill instance ``p``, a decode instance ``d``, and the events that their cores received.

    Args:
        numbers: source of all random choices.
        lease_s: of ``p`` and ``d``.

    Attributes:
        freed: how often ``p`` freed the blocks of each request.
        counted: the bytes that ``p`` had counted as sent when it first did.
        is_p_dead: ``p`` is dead, and the host that both run on knows it.
        is_p_hidden: connections to ``p`` reach another instance, which rejects them, whether ``p``
            is dead or not.
    """

    numbers: random.Random
    lease_s: tuple[float, float] = (6.0, 6.0)
    line: Line = field(default_factory=Line)
    is_p_dead: bool = False
    is_p_hidden: bool = False
    ended: defaultdict[str, list[LoadEnded]] = field(default_factory=lambda: defaultdict(list))
    freed: Counter[str] = field(default_factory=Counter)
    counted: dict[str, int] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    tasks: SpawnedTasks = field(default_factory=SpawnedTasks)
    _tasks_of_p: list[asyncio.Task[None]] = field(default_factory=list)

    def start(self) -> None:
        """Start both halves; call it on the loop."""
        loop = asyncio.get_running_loop()
        self.rank = RankOfOne(self.numbers)
        p = ConnectorContext(
            metadata_of("p"), self.lease_s[0], self._on_p_event, self._spawn_p, loop.time
        )
        d = ConnectorContext(
            metadata_of("d"),
            self.lease_s[1],
            self._on_d_event,
            self.tasks.spawn,
            loop.time,
            drain_s=DRAIN_S,
        )
        group = RankGroup(1, self.rank.send)
        self.p = PushSender(p, group, Book(self), P_ADDRESS)  # type: ignore[arg-type]  # line
        self.d = PushReceiver(d, self._inquire, self._post, convert_nothing, max_load_s=LOAD_S)
        self.rank.report = self.p.report
        self._spawn_p(self.p.keep_alive())
        self.tasks.spawn(self.d.sweep())

    def kill_p(self) -> None:
        """End ``p`` as SIGKILL does."""
        self.is_p_dead = True
        self.rank.writing.clear()
        for task in self._tasks_of_p:
            task.cancel()

    def load(self, name: str) -> None:
        """A request arrives at ``d``."""
        params = {"num_prompt_tokens": 10, "remote_cached_tokens": 0}
        self.d.load(name, (0,), RequestMetaserver("http://proxy"), params)

    def begin(self, name: str) -> None:
        """The request's prefill arrives at ``p``."""
        remote = RemoteKV("d", name, *D_ADDRESS, (0,), NUM_TOKENS, lease_s=self.lease_s[1])
        self.p.begin(f"p-{name}", PushTarget(remote, 0))

    def complete(self, name: str) -> None:
        """The request's prefill is complete."""
        self.p.complete(EndPush(f"p-{name}", True, (0,), NUM_TOKENS), TOKEN)

    def handle_d(self, message: AnyMessage) -> AnyMessage:
        """Pass a message from ``p`` to ``d``."""
        self.asked.append(type(message).__name__)
        return self.d.handle(message)

    def _handle_p(self, message: AnyMessage) -> AnyMessage:
        assert isinstance(message, StatusRequest)
        self.asked.append("StatusRequest")
        return self.p.status(message)

    async def _inquire(self, writer: Writer, names: list[str], is_local: bool) -> StatusReply:
        if self.is_p_hidden:
            raise PeerAbsent("no instance p at its address")
        if self.is_p_dead:
            raise PeerGone("instance p is gone")
        ask = self.line.ask(
            self._handle_p, lambda ticket: StatusRequest(ticket, tuple(names)), tries=1
        )
        answer = await ask
        assert isinstance(answer, StatusReply)
        return answer

    async def _post(self, metaserver: RequestMetaserver, params: KVTransferDict) -> None:
        """Nothing to post: the test brings the prefill to ``p``, or doesn't."""

    def _on_p_event(self, event: Event) -> None:
        assert isinstance(event, LeaseEnded)
        assert event.request_id not in self.rank.writing, "freed under its own writer"
        self.freed[event.request_id] += 1
        self.counted.setdefault(event.request_id, self.p.counts.nbytes)

    def _on_d_event(self, event: Event) -> None:
        assert isinstance(event, LoadEnded)
        if event.is_drained:
            assert f"p-{event.request_id}" not in self.rank.writing, "freed under the writer"
        self.ended[event.request_id].append(event)

    def _spawn_p(
        self, coroutine: Coroutine[Any, Any, None], request_id: str | None = None
    ) -> asyncio.Task[None]:
        self._tasks_of_p.append(self.tasks.spawn(coroutine))
        return self._tasks_of_p[-1]


@dataclass
class Book:
    """``p``'s peers, of which there is only ``d``."""

    pair: Pair
    is_known: bool = False

    def get(self, remote: RemoteKV) -> Book:
        """The only peer."""
        return self

    @property
    def client(self) -> Book:
        """The peer's client, which is this object."""
        return self

    def hold(self, remote: RemoteKV) -> None:
        """Nothing to do: the peer is always kept."""

    def release(self, remote: RemoteKV) -> None:
        """Nothing to do: the peer is always kept."""

    def forget_predecessors(self, remote: RemoteKV) -> None:
        """Nothing to do: there are none."""

    def check_claims(self, remote: RemoteKV) -> None:
        """Nothing to check: the claims are always valid."""

    async def ask(
        self,
        make: Callable[[int], AnyMessage],
        kind: type[Any],
        *,
        tries: int = TRIES,
        try_timeout_s: float | None = None,
    ) -> Any:
        """As ``SideChannelClient.ask``."""
        answer = await self.pair.line.ask(self.pair.handle_d, make, tries, try_timeout_s)
        if isinstance(answer, Reject):
            raise HandshakeRefused(answer.reason)
        assert isinstance(answer, kind)
        return answer

    async def handshake(self) -> None:
        """Send Hello once."""
        if not self.is_known:
            await self.say_hello()
            self.is_known = True

    async def say_hello(self) -> None:
        """Send Hello."""
        await self.ask(lambda ticket: Hello(ticket, PROTOCOL_VERSION, metadata_of("p")), object)

    async def renew(self, names: tuple[str, ...], timeout_s: float) -> tuple[str, ...]:
        """As ``Peer.renew``."""
        answer = await self.ask(
            lambda ticket: Renew(ticket, names), Renewed, tries=1, try_timeout_s=timeout_s
        )
        return tuple(answer.lost)
