"""Keepalives are sent as often as the shortest lease requires; in virtual time."""

from __future__ import annotations

import asyncio
import errno
import socket
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest
from support.ports import free_range
from support.virtual_time import run_virtually

from mooncake_kv.addresses import is_own_address
from mooncake_kv.errors import KVTransferError, PeerAbsent, PeerGone, PeerUnreachable
from mooncake_kv.liveness import (
    MIN_PEER_LEASE_S,
    Keepalive,
    KeepaliveInterval,
    StatusInquiry,
)
from mooncake_kv.params import RemoteKV
from mooncake_kv.peers import PeerTable
from mooncake_kv.protocol import PROTOCOL_VERSION, AnyMessage, Reject, StatusReply, Writer
from mooncake_kv.side_channel import SideChannelServer

SECRET = b"secret"


@dataclass
class Item:
    remote: RemoteKV


def item(peer: str = "p", lease_s: float | None = None) -> Item:
    return Item(RemoteKV(peer, "theirs", "127.0.0.1", 1, (0,), 3, lease_s=lease_s))


@dataclass
class RecordingKeepalive:
    """Records the keepalives sent to peers, with their times; some peers never answer."""

    lease_s: float = 30.0
    silent: str = ""
    has_stalled: bool = False
    items: dict[str, Item] = field(default_factory=dict)
    times: dict[str, list[float]] = field(default_factory=dict)
    names: list[set[str]] = field(default_factory=list)

    def start(self) -> None:
        self.signs = Keepalive(
            KeepaliveInterval(self.lease_s),
            self._send,
            asyncio.ensure_future,
            lambda: self.has_stalled,
        )
        self.giving = asyncio.ensure_future(self.signs.run(lambda: self.items))

    def add(self, name: str, new: Item) -> None:
        self.items[name] = new
        self.signs.wake_for(new.remote)

    async def _send(self, group: dict[str, Item], within_s: float) -> None:
        peer = next(iter(group.values())).remote.engine_id
        self.times.setdefault(peer, []).append(asyncio.get_running_loop().time())
        self.names.append(set(group))
        await asyncio.sleep(within_s if peer == self.silent else 0.0)


@pytest.mark.parametrize(
    ("leases_s", "max_s", "pause_s"),
    [
        ([], 60.0, 5.0),
        ([None, 60.0], 60.0, 5.0),
        ([60.0, 6.0], 60.0, 1.0),
        ([], 2.0, 2.0),
        ([1e-9], 60.0, MIN_PEER_LEASE_S / 6),
    ],
)
def test_shortest_lease_sets_interval(
    leases_s: list[float | None], max_s: float, pause_s: float
) -> None:
    remotes = [item(lease_s=lease_s).remote for lease_s in leases_s]
    assert KeepaliveInterval(30.0, max_s).of(remotes) == pytest.approx(pause_s)


def test_one_keepalive_per_peer_covers_all_items() -> None:
    async def main() -> None:
        keepalive = RecordingKeepalive(items={"a": item("p"), "b": item("q"), "c": item("p")})
        keepalive.start()
        await asyncio.sleep(16.0)
        assert keepalive.times == {"p": pytest.approx([5, 10, 15]), "q": pytest.approx([5, 10, 15])}
        assert keepalive.names[:2] == [{"a", "c"}, {"b"}]

    run_virtually(main())


def test_engine_that_does_not_step_stops_keepalives(caplog: pytest.LogCaptureFixture) -> None:
    """Logged once; when the engine steps again, keepalives resume."""

    async def main() -> None:
        keepalive = RecordingKeepalive(items={"a": item("p")})
        keepalive.start()
        await asyncio.sleep(6.0)
        keepalive.has_stalled = True
        await asyncio.sleep(30.0)
        assert keepalive.times["p"] == pytest.approx([5.0])
        keepalive.has_stalled = False
        await asyncio.sleep(5.0)
        assert keepalive.times["p"] == pytest.approx([5.0, 40.0])

    run_virtually(main())
    assert caplog.text.count("keepalives to peers are suspended") == 1


def test_shorter_lease_shortens_current_wait() -> None:
    async def main() -> None:
        keepalive = RecordingKeepalive(lease_s=300.0)
        keepalive.start()
        await asyncio.sleep(10.0)
        keepalive.add("a", item(lease_s=120.0))
        await asyncio.sleep(11.0)
        assert keepalive.times["p"] == pytest.approx([20.0])
        keepalive.items.clear()
        await asyncio.sleep(100.0)
        assert keepalive.times["p"] == pytest.approx([20.0])

    run_virtually(main())


def test_new_peers_do_not_postpone_keepalives() -> None:
    async def main() -> None:
        keepalive = RecordingKeepalive()
        keepalive.start()
        for count in range(100):
            await asyncio.sleep(0.11)
            keepalive.add(str(count), item(lease_s=30.0 - 0.01 * count))
        assert len(keepalive.times["p"]) == 2

    run_virtually(main())


def test_short_lease_of_one_peer_is_its_own_affair() -> None:
    """A request may name any lease. Peers with others get no more keepalives, and none late."""

    async def main() -> None:
        keepalive = RecordingKeepalive(items={"a": item("p"), "b": item("q", 12.0)})
        keepalive.start()
        keepalive.add("c", item("r", 1e-9))
        await asyncio.sleep(60.0)
        del keepalive.items["c"]
        await asyncio.sleep(60.0)
        for peer, interval_s in (("p", 5.0), ("q", 2.0)):
            times = [0.0, *keepalive.times[peer]]
            gaps = [after - before for before, after in pairwise(times)]
            assert max(gaps) < interval_s + 1e-6
            assert 120.0 / interval_s - 1 <= len(gaps) <= 1.3 * 120.0 / interval_s

    run_virtually(main())


def test_silent_peer_delays_no_other() -> None:
    """The silent peer's lease is long: its reply is awaited for longer than the other peer's whole
    lease."""

    async def main() -> None:
        keepalive = RecordingKeepalive(
            lease_s=60.0, silent="q", items={"a": item("p", 3.0), "b": item("q")}
        )
        keepalive.start()
        await asyncio.sleep(20.1)
        assert len(keepalive.times["p"]) == 40
        first, second = keepalive.times["q"]
        assert second - first >= 10.0

    run_virtually(main())


class SinglePeerTable:
    """A peer table with one peer, at whose address any instance may answer.

    Args:
        answers_as: the epoch of the instance that answers.
    """

    def __init__(self, answers_as: str = "p-1") -> None:
        self.forgotten: list[str] = []
        self._answers_as = answers_as

    def get(self, writer: Writer) -> SinglePeerTable:
        return self

    @property
    def client(self) -> SinglePeerTable:
        return self

    async def ask(self, make: Any, kind: type[StatusReply], *, tries: int) -> StatusReply:
        return StatusReply(1, self._answers_as, tuple(make(1).request_ids), ())

    def forget(self, writer: Writer, reason: str) -> None:
        self.forgotten.append(reason)


def ask(book: SinglePeerTable, host: str, port: int, *, is_local: bool) -> StatusReply:
    async def main() -> StatusReply:
        inquiry = StatusInquiry(book)  # type: ignore[arg-type]
        try:
            return await inquiry.ask(Writer("p-1", "a", host, port), ["a"], is_local=is_local)
        finally:
            inquiry.close()

    return asyncio.run(main())


@pytest.mark.parametrize(("is_local", "error"), [(True, PeerGone), (False, PeerAbsent)])
def test_refused_connection_means_the_writer_is_gone(
    is_local: bool, error: type[KVTransferError]
) -> None:
    book = SinglePeerTable()
    with pytest.raises(error, match=r"p-1 is .*nothing listens"):
        ask(book, "127.0.0.1", free_range(1).first, is_local=is_local)
    assert book.forgotten == ["nothing listens there now"]


@pytest.mark.parametrize(("is_local", "error"), [(True, PeerGone), (False, PeerAbsent)])
def test_other_instance_at_address_means_writer_is_gone(
    is_local: bool, error: type[KVTransferError], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StatusInquiry, "_connect", _accepts_connections)
    with pytest.raises(error, match="p-2 listens"):
        ask(SinglePeerTable("p-2"), "127.0.0.1", 1, is_local=is_local)


@pytest.mark.parametrize(
    ("secret", "version"),
    [(SECRET, PROTOCOL_VERSION), (b"another secret", PROTOCOL_VERSION), (SECRET, 99)],
    ids=["another connector", "another secret", "another version"],
)
def test_whatever_else_answers_at_the_address_means_the_writer_is_absent(
    secret: bytes, version: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer has our secret and our version, and answers this question."""

    def reject(message: AnyMessage) -> AnyMessage:
        return Reject(message.ticket, f"{type(message).__name__} is not a request to this one")

    async def main() -> None:
        monkeypatch.setattr("mooncake_kv.side_channel.PROTOCOL_VERSION", version)
        server = await SideChannelServer.listen("127.0.0.1", (0,), secret, reject)
        monkeypatch.undo()
        peers = PeerTable(SECRET, None)  # type: ignore[arg-type]  # there is no handshake
        inquiry = StatusInquiry(peers)
        for is_local in (False, True):
            writer = Writer("p-1", "a", "127.0.0.1", server.port)
            with pytest.raises(PeerAbsent, match=r"p-1 is not at 127\.0\.0\.1"):
                await inquiry.ask(writer, ["a"], is_local=is_local)
            assert len(peers) == 0
        inquiry.close()
        server.close()

    asyncio.run(asyncio.wait_for(main(), 10))


def test_live_writer_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StatusInquiry, "_connect", _accepts_connections)
    assert ask(SinglePeerTable(), "127.0.0.1", 1, is_local=False).running == ("a",)


@pytest.mark.parametrize(
    ("host", "is_ours"),
    [("127.0.0.1", True), ("localhost", True), ("192.0.2.1", False), ("host.invalid", False)],
)
def test_own_addresses_are_recognised(host: str, is_ours: bool) -> None:
    assert asyncio.run(is_own_address(host)) == is_ours


async def _accepts_connections(inquiry: StatusInquiry, writer: Writer) -> None:
    """Whether something listens at the address."""


class SilentPeer(SinglePeerTable):
    """A peer that never answers."""

    async def ask(self, make: Any, kind: type[StatusReply], *, tries: int) -> StatusReply:
        raise KVTransferError("no answer")


@pytest.mark.parametrize(
    ("number", "is_local", "error"),
    [
        (errno.EHOSTUNREACH, False, PeerUnreachable),
        (errno.ETIMEDOUT, False, PeerUnreachable),
        (errno.ETIMEDOUT, True, KVTransferError),
        (errno.EMFILE, False, KVTransferError),
    ],
)
def test_host_that_does_not_answer_is_unreachable(
    number: int, is_local: bool, error: type[KVTransferError], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Our own host does answer: a connection error there means a full queue or too few
    descriptors."""

    async def connect(loop: object, factory: object, host: str, port: int) -> None:
        raise OSError(number, "from a test")

    monkeypatch.setattr(asyncio.BaseEventLoop, "create_connection", connect)
    with pytest.raises(KVTransferError, match="p-1 can't be reached") as caught:
        ask(SinglePeerTable(), "127.0.0.1", 1, is_local=is_local)
    assert caught.type is error


def test_closed_connections_are_not_retained() -> None:
    """Connections to instances that are gone for good and are not asked again."""

    async def main() -> None:
        inquiry = StatusInquiry(SilentPeer())  # type: ignore[arg-type]
        for _ in range(3):
            with socket.create_server(("127.0.0.1", 0), backlog=1) as stopped:
                writer = Writer("p-1", "a", *stopped.getsockname())
                with pytest.raises(KVTransferError, match="no answer"):
                    await inquiry.ask(writer, ["a"], is_local=False)
                line = inquiry._connections[writer.host, writer.port]
            await line.closed.wait()
        assert list(inquiry._connections.values()) == [line]
        inquiry.close()

    asyncio.run(asyncio.wait_for(main(), 10))


def test_connection_to_a_stopped_process_is_kept() -> None:
    """Repeated probes fill no accept queue; when the process exits, it is detected."""

    async def main() -> None:
        # does not accept connections
        with socket.create_server(("127.0.0.1", 0), backlog=1) as stopped:
            writer = Writer("p-1", "a", *stopped.getsockname())
            inquiry = StatusInquiry(SilentPeer())  # type: ignore[arg-type]
            for _ in range(5):
                with pytest.raises(KVTransferError, match="no answer") as caught:
                    await inquiry.ask(writer, ["a"], is_local=False)
                assert caught.type is KVTransferError
        [line] = inquiry._connections.values()
        await line.closed.wait()
        with pytest.raises(PeerAbsent, match="nothing listens"):
            await inquiry.ask(writer, ["a"], is_local=False)
        inquiry.close()

    asyncio.run(asyncio.wait_for(main(), 10))
