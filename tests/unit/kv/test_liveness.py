"""Keepalives are sent as often as the shortest lease requires; in virtual time."""

from __future__ import annotations

import asyncio
import errno
import socket
from dataclasses import dataclass, field
from typing import Any

import pytest
from support.ports import free_range
from support.virtual_time import run_virtually

from mooncake_kv.addresses import is_own_address
from mooncake_kv.errors import KVTransferError, PeerAbsent, PeerGone, PeerUnreachable
from mooncake_kv.liveness import (
    MIN_INTERVAL_S,
    Keepalive,
    KeepaliveInterval,
    StatusInquiry,
)
from mooncake_kv.params import RemoteKV
from mooncake_kv.protocol import StatusReply, Writer


@dataclass
class Item:
    remote: RemoteKV


def item(peer: str = "p", lease_s: float | None = None) -> Item:
    return Item(RemoteKV(peer, "theirs", "127.0.0.1", 1, (0,), 3, lease_s=lease_s))


@dataclass
class Told:
    """Records the keepalives that peers get, and when; some peers never answer."""

    lease_s: float = 30.0
    silent: str = ""
    has_stalled: bool = False
    items: dict[str, Item] = field(default_factory=dict)
    times: dict[str, list[float]] = field(default_factory=dict)
    names: list[set[str]] = field(default_factory=list)

    def start(self) -> None:
        self.signs = Keepalive(
            KeepaliveInterval(self.lease_s),
            self._tell,
            asyncio.ensure_future,
            lambda: self.has_stalled,
        )
        self.giving = asyncio.ensure_future(self.signs.run(lambda: self.items))

    def add(self, name: str, new: Item) -> None:
        self.items[name] = new
        self.signs.wake_for(new.remote)

    async def _tell(self, group: dict[str, Item], within_s: float) -> None:
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
        ([1e-9], 60.0, MIN_INTERVAL_S),
    ],
)
def test_the_shortest_lease_decides(
    leases_s: list[float | None], max_s: float, pause_s: float
) -> None:
    remotes = [item(lease_s=lease_s).remote for lease_s in leases_s]
    assert KeepaliveInterval(30.0, max_s).of(remotes) == pytest.approx(pause_s)


def test_a_peer_gets_one_keepalive_for_all_of_its_items() -> None:
    async def main() -> None:
        told = Told(items={"a": item("p"), "b": item("q"), "c": item("p")})
        told.start()
        await asyncio.sleep(16.0)
        assert told.times == {"p": pytest.approx([5, 10, 15]), "q": pytest.approx([5, 10, 15])}
        assert told.names[:2] == [{"a", "c"}, {"b"}]

    run_virtually(main())


def test_an_engine_that_does_not_step_lets_its_peers_go(caplog: pytest.LogCaptureFixture) -> None:
    """Said once; when it steps again, it speaks again."""

    async def main() -> None:
        told = Told(items={"a": item("p")})
        told.start()
        await asyncio.sleep(6.0)
        told.has_stalled = True
        await asyncio.sleep(30.0)
        assert told.times["p"] == pytest.approx([5.0])
        told.has_stalled = False
        await asyncio.sleep(5.0)
        assert told.times["p"] == pytest.approx([5.0, 40.0])

    run_virtually(main())
    assert caplog.text.count("keepalives to peers are suspended") == 1


def test_a_shorter_lease_cuts_the_pause_that_is_running() -> None:
    async def main() -> None:
        told = Told(lease_s=300.0)
        told.start()
        await asyncio.sleep(10.0)
        told.add("a", item(lease_s=120.0))
        await asyncio.sleep(11.0)
        assert told.times["p"] == pytest.approx([20.0])
        told.items.clear()
        await asyncio.sleep(100.0)
        assert told.times["p"] == pytest.approx([20.0])

    run_virtually(main())


def test_new_peers_do_not_postpone_keepalives() -> None:
    async def main() -> None:
        told = Told()
        told.start()
        for count in range(100):
            await asyncio.sleep(0.11)
            told.add(str(count), item(lease_s=30.0 - 0.01 * count))
        assert len(told.times["p"]) == 2

    run_virtually(main())


def test_a_silent_peer_delays_no_other() -> None:
    """Its own lease is long: it is waited for longer than the other one's whole lease."""

    async def main() -> None:
        told = Told(lease_s=60.0, silent="q", items={"a": item("p", 3.0), "b": item("q")})
        told.start()
        await asyncio.sleep(20.1)
        assert len(told.times["p"]) == 40
        first, second = told.times["q"]
        assert second - first >= 10.0

    run_virtually(main())


class Book:
    """A table of one peer; any instance may answer there.

    Args:
        answers_as: its epoch.
    """

    def __init__(self, answers_as: str = "p-1") -> None:
        self.forgotten: list[str] = []
        self._answers_as = answers_as

    def get(self, writer: Writer) -> Book:
        return self

    @property
    def client(self) -> Book:
        return self

    async def ask(self, make: Any, kind: type[StatusReply], *, tries: int) -> StatusReply:
        return StatusReply(1, self._answers_as, tuple(make(1).request_ids), ())

    def forget(self, writer: Writer, reason: str) -> None:
        self.forgotten.append(reason)


def ask(book: Book, host: str, port: int, *, is_local: bool) -> StatusReply:
    async def main() -> StatusReply:
        inquiry = StatusInquiry(book)  # type: ignore[arg-type]
        try:
            return await inquiry.ask(Writer("p-1", "a", host, port), ["a"], is_local=is_local)
        finally:
            inquiry.close()

    return asyncio.run(main())


@pytest.mark.parametrize(("is_local", "error"), [(True, PeerGone), (False, PeerAbsent)])
def test_a_refused_connection_means_the_writer_is_gone(
    is_local: bool, error: type[KVTransferError]
) -> None:
    book = Book()
    with pytest.raises(error, match=r"p-1 is .*nothing listens"):
        ask(book, "127.0.0.1", free_range(1).first, is_local=is_local)
    assert book.forgotten == ["nothing listens there now"]


@pytest.mark.parametrize(("is_local", "error"), [(True, PeerGone), (False, PeerAbsent)])
def test_another_instance_at_the_address_means_the_writer_is_gone(
    is_local: bool, error: type[KVTransferError], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StatusInquiry, "_connect", _is_let_in)
    with pytest.raises(error, match="p-2 listens"):
        ask(Book("p-2"), "127.0.0.1", 1, is_local=is_local)


def test_a_live_writer_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StatusInquiry, "_connect", _is_let_in)
    assert ask(Book(), "127.0.0.1", 1, is_local=False).running == ("a",)


@pytest.mark.parametrize(
    ("host", "is_ours"),
    [("127.0.0.1", True), ("localhost", True), ("192.0.2.1", False), ("host.invalid", False)],
)
def test_own_addresses_are_recognised(host: str, is_ours: bool) -> None:
    assert asyncio.run(is_own_address(host)) == is_ours


async def _is_let_in(inquiry: StatusInquiry, writer: Writer) -> None:
    """Somebody listens."""


class Mute(Book):
    """One that never answers."""

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
def test_a_host_that_does_not_answer_is_unreachable(
    number: int, is_local: bool, error: type[KVTransferError], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Our own host does, whatever it says: a queue is full, or descriptors are short."""

    async def connect(loop: object, factory: object, host: str, port: int) -> None:
        raise OSError(number, "from a test")

    monkeypatch.setattr(asyncio.BaseEventLoop, "create_connection", connect)
    with pytest.raises(KVTransferError, match="p-1 can't be reached") as caught:
        ask(Book(), "127.0.0.1", 1, is_local=is_local)
    assert caught.type is error


def test_nothing_is_kept_of_connections_that_are_over() -> None:
    """Connections to instances that have gone for good, and are not asked again."""

    async def main() -> None:
        inquiry = StatusInquiry(Mute())  # type: ignore[arg-type]
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


def test_the_connection_to_a_stopped_process_is_kept() -> None:
    """However often it is looked for, it fills no queue; when it goes, it is found out."""

    async def main() -> None:
        with socket.create_server(("127.0.0.1", 0), backlog=1) as stopped:  # accepts nothing
            writer = Writer("p-1", "a", *stopped.getsockname())
            inquiry = StatusInquiry(Mute())  # type: ignore[arg-type]
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
