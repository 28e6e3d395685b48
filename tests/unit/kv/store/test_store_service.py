"""A store behind sessions: the same replies as in its own process, and misses when it is gone."""

import asyncio
import logging
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import Future
from types import SimpleNamespace

import pytest
from msgspec import structs

from mooncake_hal.errors import AccessDenied, PeerLost, RequestRejected
from mooncake_hal.negotiation import Transports
from mooncake_hal.registry import Registry
from mooncake_hal.session.aio import AsyncSession
from mooncake_hal.session.connection_limits import LIMITS
from mooncake_hal.session.processes import this_process
from mooncake_hal.transport import EndpointOptions
from mooncake_kv.errors import BadFrame
from mooncake_kv.store import store_client, store_messages
from mooncake_kv.store.chunk_store import (
    Chunk,
    ChunkContent,
    CopyTerms,
    PutRefusal,
    Residence,
    Tier,
)
from mooncake_kv.store.node_store import NodeStore, NodeStoreConfig
from mooncake_kv.store.ssd_config import SsdConfig, SsdDirectoryConfig
from mooncake_kv.store.store_client import StoreClient
from mooncake_kv.store.store_messages import (
    MAX_KEYS,
    ChunkPage,
    OpenSession,
    Pending,
    Poll,
    ProbeKeys,
    ReserveChunks,
    Verified,
    VerifyRecords,
    decode_reply,
    decode_request,
    encode_message,
)
from mooncake_kv.store.store_service import ABANDONED_S, StoreAddress, StoreService

NBYTES = 64 << 10
WAIT_S = 60
SECRET = b"secret"


def chunk(number, tenant=""):
    return Chunk(b"key-%d" % number, None, 0, NBYTES, 16, tenant)


class Served:
    """A store, its service and clients, all in this process."""

    def __init__(self, port=0, ssd=None):
        self.store = NodeStore(NodeStoreConfig(8 * NBYTES, quarantine_s=0.1, ssd=ssd))
        options = EndpointOptions(secret=SECRET)
        self.transports = Transports.open(Registry.discover(), options, wanted="shm")
        address = StoreAddress("127.0.0.1", port, SECRET)
        self.service = StoreService.start(self.store, self.transports, address)
        self.address = StoreAddress("127.0.0.1", self.service.port, SECRET)

    def cut_off(self):
        """Cut all sessions without notice."""
        for session in list(self.service._users):
            self.service._loop.call("", session.abort, PeerLost("cut off"))

    def await_stats(self, **wanted):
        pause = threading.Event()
        for _ in range(int(WAIT_S / 0.02)):
            stats = self.store.stats()
            found = {name: getattr(stats, name) for name in wanted}
            if found == wanted:
                return
            pause.wait(0.02)
        raise AssertionError(f"{found}, not {wanted}")

    def close(self):
        self.service.close()
        self.transports.close()
        self.store.check_integrity()
        self.store.close()


@pytest.fixture
def served():
    served = Served()
    yield served
    served.close()


@pytest.fixture
def client(served):
    client = StoreClient(served.address)
    assert client.await_store(WAIT_S)
    yield client
    client.close()


def put(client, *numbers, tenant=""):
    handles = client.reserve([chunk(n, tenant) for n in numbers]).result(WAIT_S)
    assert client.commit(handles).result(WAIT_S) == [True] * len(numbers)


def test_every_call_gets_the_reply_of_the_store(served, client):
    assert client.arena == served.store.arena
    put(client, 1, 2)
    (refused,) = client.reserve([chunk(1)]).result(WAIT_S)
    assert refused is PutRefusal.PRESENT
    found = client.probe([chunk(1).key, b"absent"]).result(WAIT_S)
    assert found == [Residence.DRAM, Residence.ABSENT]
    first, absent = client.pin([chunk(1).key, b"absent"], lease_s=5).result(WAIT_S)
    assert absent is None
    assert (first.nbytes, first.lease_s, first.tier) == (NBYTES, 5.0, Tier.DRAM)
    assert client.release([first, first]).result(WAIT_S) == [True, False]
    copy = client.reserve([chunk(3)], copy=CopyTerms(1, 0.1, 1.0))
    assert client.abort(copy.result(WAIT_S)).result(WAIT_S) == [True]
    client.touch([chunk(1).key]).result(WAIT_S)
    assert client.stats().result(WAIT_S) == served.store.stats()
    assert client.drop([chunk(2).key, b"absent"]).result(WAIT_S) == 1
    assert client.verify().result(WAIT_S) == (0, 0)


def test_failed_verify_of_ssds_fails_alone(served, client, monkeypatch):
    may_fail = threading.Event()

    def fails():
        assert may_fail.wait(WAIT_S)
        raise OSError("the drive is gone")

    monkeypatch.setattr(served.store, "verify", fails)
    asked = client.verify()
    may_fail.set()
    assert asked.result(WAIT_S) is None
    assert client.probe([b"absent"]).result(WAIT_S) == [Residence.ABSENT]


def test_chunks_are_listed_in_pages_and_dropped_by_tenant(served, client, monkeypatch):
    for module in ("store_service", "store_client"):
        monkeypatch.setattr(f"mooncake_kv.store.{module}.PAGE_CHUNKS", 2)
    put(client, 1, 2, 3)
    put(client, 4, 5, tenant="t")
    listed = client.list_chunks(Tier.DRAM)
    assert [c.key for c in listed] == [chunk(n).key for n in range(1, 6)]
    assert client.list_chunks(Tier.SSD) == []
    assert client.drop_matching(tenant="t").result(WAIT_S) == 2
    assert client.drop_matching().result(WAIT_S) == 3


def test_store_is_read_once_for_all_pages_of_a_listing(served, client, monkeypatch):
    for module in ("store_service", "store_client"):
        monkeypatch.setattr(f"mooncake_kv.store.{module}.PAGE_CHUNKS", 2)
    num_reads, read = [], served.store.chunks
    monkeypatch.setattr(served.store, "chunks", lambda: num_reads.append(1) or read())
    keys = [bytes([first, 7]) for first in (200, 3, 255, 0, 3, 77)]
    keys[4] += b"x"
    chunks = [structs.replace(chunk(1), key=key) for key in keys]
    assert client.commit(client.reserve(chunks).result(WAIT_S)).result(WAIT_S) == [True] * 6
    first = client.list_page(Tier.DRAM, b"").result(WAIT_S)
    put(client, 2)
    pages = [first]
    while len(pages[-1]) == 2:
        pages.append(client.list_page(Tier.DRAM, pages[-1][-1].key).result(WAIT_S))
    assert [c.key for page in pages for c in page] == sorted(keys)
    assert len(num_reads) == 1
    assert [c.key for c in client.list_chunks(Tier.DRAM)] == sorted([*keys, chunk(2).key])
    assert len(num_reads) == 2
    # a session that is opened in the middle of a listing goes on behind the last key
    other = StoreClient(served.address)
    assert other.await_store(WAIT_S)
    [last] = other.list_page(Tier.DRAM, b"\xc8\x07").result(WAIT_S)
    assert last.key == b"\xff\x07"
    other.close()


def test_page_of_the_largest_chunks_fits_into_a_frame():
    names = {"key": bytes(64), "parent": bytes(64), "tenant": "t" * 512}
    largest = Chunk(position=1 << 40, nbytes=1 << 40, num_tokens=1 << 40, **names)
    page = encode_message(ChunkPage((largest,) * store_messages.PAGE_CHUNKS))
    assert len(page) < LIMITS.frame_bytes / 2


def test_listed_chunks_have_no_content(served, client):
    offered = structs.replace(chunk(1), content=ChunkContent(b"n", bytes(64)))
    assert client.commit(client.reserve([offered]).result(WAIT_S)).result(WAIT_S) == [True]
    assert client.list_chunks(Tier.DRAM) == [chunk(1)]


def test_dropping_all_chunks_does_not_block_other_users(served, client, monkeypatch):
    may_end = threading.Event()
    monkeypatch.setattr(served.store, "drop", lambda keys: may_end.wait(WAIT_S) and len(keys))
    put(client, 1, 2)
    asked = client.drop_matching()
    assert client.pin([b"absent"]).result(WAIT_S) == [None]
    assert not asked.done()
    may_end.set()
    assert asked.result(WAIT_S) == 2


def test_handles_belong_to_their_session_and_end_with_it(served, client):
    other = StoreClient(served.address)
    assert other.await_store(WAIT_S)
    put(client, 1)
    (handle,) = client.pin([chunk(1).key]).result(WAIT_S)
    assert other.release([handle]).result(WAIT_S) == [False]
    other.reserve([chunk(2)]).result(WAIT_S)
    other.close()  # its unfinished write may have failed: data may still arrive
    stats = served.store.stats()
    assert (stats.num_staging, stats.num_pins, stats.quarantine_bytes) == (0, 1, NBYTES)
    assert client.release([handle]).result(WAIT_S) == [True]


USER = """
import sys
from mooncake_kv.store.store_client import StoreClient
from mooncake_kv.store.store_service import StoreAddress
from mooncake_kv.store.chunk_store import Chunk
client = StoreClient(StoreAddress("127.0.0.1", int(sys.argv[1]), b"secret"))
assert client.await_store(60)
chunks = [Chunk(b"frozen-%d" % n, None, 0, 64 << 10, 16) for n in range(8)]
client.reserve(chunks, lease_s=0.1).result(60)
print("reserved", flush=True)
input()
"""


@pytest.fixture
def frozen(served):
    """A process that has reserved all memory and is frozen before it writes."""
    command = [sys.executable, "-c", USER, str(served.address.port)]
    pipes = dict.fromkeys(("stdin", "stdout"), subprocess.PIPE)
    with subprocess.Popen(command, **pipes, text=True) as process:
        assert process.stdout.readline() == "reserved\n"
        process.send_signal(signal.SIGSTOP)
        yield process
        process.kill()


def test_memory_of_a_frozen_writer_is_not_reused_until_its_process_has_exited(
    served, frozen, caplog
):
    served.cut_off()
    served.await_stats(num_staging=0, abandoned_bytes=8 * NBYTES)
    assert "with writes in flight" in caplog.text
    user = served.store.open_user()
    threading.Event().wait(0.3)  # three quarantines
    assert user.reserve([chunk(1)]).result() == [PutRefusal.NO_SPACE]
    frozen.kill()
    served.await_stats(abandoned_bytes=0, quarantine_bytes=8 * NBYTES)


def test_thawed_writer_names_its_writes_in_flight(served, frozen):
    served.cut_off()
    served.await_stats(abandoned_bytes=8 * NBYTES)
    frozen.send_signal(signal.SIGCONT)
    for _ in range(int(WAIT_S / 0.02)):
        if served.service._users:
            break
        threading.Event().wait(0.02)
    served.await_stats(abandoned_bytes=8 * NBYTES)
    frozen.kill()
    served.await_stats(abandoned_bytes=0, quarantine_bytes=8 * NBYTES)


def test_user_that_has_lost_its_session_ends_its_writes_on_the_next(served, client):
    ended, writing = client.reserve([chunk(1), chunk(2)]).result(WAIT_S)
    client._writing.remove(ended.handle_id)  # as if the store's reply had been lost
    served.cut_off()
    await_new_session(client)
    served.await_stats(num_staging=0, abandoned_bytes=NBYTES, quarantine_bytes=NBYTES)
    assert client.commit([writing]).result(WAIT_S) == [False]
    served.await_stats(abandoned_bytes=0, free_bytes=7 * NBYTES)
    put(client, 1, 2)
    served.cut_off()
    await_new_session(client)
    assert not served.service._departed


@pytest.mark.parametrize("is_complete", [True, False])
def test_writes_that_end_while_their_client_reconnects_are_ended_in_the_store(
    served, client, monkeypatch, is_complete
):
    ended, writing = client.reserve([chunk(1), chunk(2)]).result(WAIT_S)
    open_session = StoreClient._open_session
    end = client.commit if is_complete else client.abort

    async def open_and_end(client, session):
        arena = await open_session(client, session)  # which has named both writes
        assert end([ended]).result(0) == [False]
        return arena

    monkeypatch.setattr(StoreClient, "_open_session", open_and_end)
    served.cut_off()
    await_new_session(client)
    served.await_stats(num_staging=0, abandoned_bytes=NBYTES, quarantine_bytes=NBYTES)
    assert client._writing == {writing.handle_id}


@pytest.mark.parametrize("may_still_arrive", [False, True])
def test_aborted_write_is_quarantined_if_its_user_says_that_data_may_still_arrive(
    served, client, may_still_arrive
):
    handles = client.reserve([chunk(1)]).result(WAIT_S)
    assert client.abort(handles, may_still_arrive=may_still_arrive).result(WAIT_S) == [True]
    assert served.store.stats().quarantine_bytes == (NBYTES if may_still_arrive else 0)


def test_undetected_dead_session_is_ended_by_the_users_next(served, monkeypatch):
    always = SimpleNamespace(token_bytes=lambda count: b"1" * count)
    monkeypatch.setattr("mooncake_kv.store.store_client.secrets", always)
    monkeypatch.setattr("mooncake_kv.store.store_client.RECONNECT_PAUSE_S", WAIT_S)
    first = StoreClient(served.address)
    assert first.await_store(WAIT_S)
    first.reserve([chunk(1)]).result(WAIT_S)
    second = StoreClient(served.address)
    assert second.await_store(WAIT_S)
    served.await_stats(num_staging=0, abandoned_bytes=0, quarantine_bytes=NBYTES)
    assert len(served.service._users) == 1
    second.close()
    first.close()


def await_new_session(client):
    former = client._session
    for _ in range(int(WAIT_S / 0.02)):
        if client._session not in (None, former):
            return
        threading.Event().wait(0.02)
    raise AssertionError("the client has no new session")


@pytest.mark.parametrize("are_seen", [True, False])
def test_wait_for_invisible_writers_is_bounded(served, client, monkeypatch, are_seen):
    monkeypatch.setattr("mooncake_kv.store.store_service.UNSEEN_WRITERS_S", 0.2)
    monkeypatch.setattr("mooncake_kv.store.store_service.QUARANTINE_MARGIN_S", 0.0)
    writer = this_process()
    client.name_writers([writer if are_seen else structs.replace(writer, host="another")])
    client.reserve([chunk(1)]).result(WAIT_S)
    monkeypatch.setattr("mooncake_kv.store.store_client.RECONNECT_PAUSE_S", WAIT_S)
    (user,) = served.service._users.values()
    user.transfer_timeout_s = 0.1
    served.cut_off()
    served.await_stats(num_staging=0)
    threading.Event().wait(0.5)
    assert bool(served.service._departed) == are_seen


def test_writers_named_during_a_connect_reach_the_store(served, monkeypatch):
    writers, open_session = (structs.replace(this_process(), pid=1),), StoreClient._open_session

    async def open_and_name(client, session):
        arena = await open_session(client, session)
        client.name_writers(writers)
        return arena

    monkeypatch.setattr(StoreClient, "_open_session", open_and_name)
    client = StoreClient(served.address)
    assert client.await_store(WAIT_S)
    client.stats().result(WAIT_S)  # which follows
    (user,) = served.service._users.values()
    assert user.writers == writers
    client.close()


def test_client_closed_during_handshake_leaves_no_connection(served, monkeypatch):
    sessions, has_begun = [], threading.Event()

    async def open_session(client, session):
        sessions.append(session)
        has_begun.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(StoreClient, "_open_session", open_session)
    client = StoreClient(served.address)
    assert has_begun.wait(WAIT_S)
    client.close()
    assert sessions[0].closed.done()


def test_client_that_connects_while_it_is_closed_leaves_no_connection(served, monkeypatch):
    sessions, is_closing = [], asyncio.Event()
    open_session, close_session = StoreClient._open_session, StoreClient._close_session
    has_begun = threading.Event()

    async def open_late(client, session):
        sessions.append(session)
        has_begun.set()
        await is_closing.wait()
        return await open_session(client, session)

    async def close_early(client):
        await close_session(client)
        is_closing.set()
        await asyncio.to_thread(client._answered.wait, WAIT_S)

    monkeypatch.setattr(StoreClient, "_open_session", open_late)
    monkeypatch.setattr(StoreClient, "_close_session", close_early)
    client = StoreClient(served.address)
    assert has_begun.wait(WAIT_S)
    client.close()
    assert sessions[0].closed.done()


@pytest.mark.parametrize("timeout_s", [float("nan"), 0.0, 4000.0])
def test_user_with_invalid_transfer_timeout_is_rejected(served, caplog, timeout_s):
    client = StoreClient(served.address, transfer_timeout_s=timeout_s)
    assert not client.await_store(1.0)
    client.close()
    assert caplog.text.count("change --transfer-timeout-seconds") == 1


def test_client_without_secret_finds_no_store(served, caplog):
    caplog.set_level(logging.CRITICAL)
    outsider = StoreClient(StoreAddress("127.0.0.1", served.address.port, b"other"))
    assert not outsider.await_store(WAIT_S)
    assert outsider.is_refused
    assert outsider.arena is None
    assert outsider.probe([b"key"]).result(WAIT_S) == [Residence.ABSENT]
    assert outsider.pin([b"key"]).result(WAIT_S) == [None]
    assert outsider.reserve([chunk(1)]).result(WAIT_S) == [PutRefusal.UNREACHABLE]
    assert outsider.stats().result(WAIT_S) is None
    assert outsider.list_chunks(Tier.DRAM) is None
    outsider.close()


def test_rejecting_store_is_asked_rarely_and_its_reason_logged_once(monkeypatch, caplog):
    """The store logs every attempt."""
    attempts, pauses = [], []
    answers = [
        PeerLost("no listener"),
        AccessDenied("another secret"),
        AccessDenied("another secret"),
    ]

    async def connect(*_, **__):
        attempts.append(answers.pop(0) if answers else AccessDenied("one more"))
        raise attempts[-1]

    async def sleep(seconds):
        pauses.append(seconds)
        if not answers:
            await asyncio.Event().wait()

    monkeypatch.setattr(store_client, "connect", connect)
    monkeypatch.setattr(store_client.asyncio, "sleep", sleep)
    client = StoreClient(StoreAddress("127.0.0.1", 1, SECRET))
    assert not client.await_store(WAIT_S)
    while len(pauses) < 3:
        threading.Event().wait(0.01)
    monkeypatch.undo()
    assert pauses == [store_client.RECONNECT_PAUSE_S] + 2 * [store_client.REFUSED_PAUSE_S]
    assert caplog.text.count("rejects this client: another secret") == 1
    assert "no listener" not in caplog.text
    client.close()


def test_draining_store_ends_reads_and_grants_no_others(served, client):
    put(client, 1)
    (handle,) = client.pin([chunk(1).key]).result(WAIT_S)
    draining = threading.Thread(target=served.service.drain, args=(WAIT_S,))
    draining.start()
    while (granted := client.reserve([chunk(2)]).result(WAIT_S)) != [PutRefusal.UNREACHABLE]:
        client.abort(granted).result(WAIT_S)
    assert client.pin([chunk(1).key]).result(WAIT_S) == [None]
    assert draining.is_alive()
    assert client.release([handle]).result(WAIT_S) == [True]
    draining.join(WAIT_S)
    assert not draining.is_alive()


def test_second_stop_ends_draining(served, client):
    put(client, 1)
    client.pin([chunk(1).key]).result(WAIT_S)
    served.service.stop()
    served.service.drain(WAIT_S * 10)


def test_restarted_store_is_reconnected_and_old_handles_are_invalid(caplog):
    caplog.set_level(logging.CRITICAL)
    first = Served()
    client = StoreClient(first.address)
    assert client.await_store(WAIT_S)
    put(client, 1)
    (handle,) = client.pin([chunk(1).key]).result(WAIT_S)
    epoch = client.arena.epoch
    first.close()
    second = Served(first.address.port)
    wait_for_epoch(client, epoch)
    assert client.release([handle]).result(WAIT_S) == [False]
    put(client, 1)
    client.close()
    second.close()


def wait_for_epoch(client, former):
    done = threading.Event()
    for _ in range(int(WAIT_S / 0.05)):
        arena = client.arena
        if arena is not None and arena.epoch != former:
            return
        done.wait(0.05)
    raise AssertionError("the store was not found again")


def test_store_that_does_not_reply_costs_one_timeout(served, client, monkeypatch, caplog):
    caplog.set_level(logging.CRITICAL)
    monkeypatch.setattr("mooncake_kv.store.store_client.REQUEST_TIMEOUT_S", 0.3)
    frozen = threading.Event()
    monkeypatch.setattr(served.store, "touch", lambda keys: frozen.wait(WAIT_S))
    client.touch([b"key"]).result(WAIT_S)
    assert client.probe([b"key"]).result(WAIT_S) == [Residence.ABSENT]
    assert client.pin([b"key"]).done(), "a miss at once, while the client reconnects"
    frozen.set()


def test_invalid_messages_are_rejected(served, client, monkeypatch):
    for payload in (b"", b"\xc1", b"\x81\xa4kind\xa5nobody", encode_message(ProbeKeys(()))[:-1]):
        with pytest.raises(BadFrame):
            decode_request(payload)
    too_many = encode_message(ProbeKeys((b"k",) * (MAX_KEYS + 1)))
    with pytest.raises(BadFrame, match="more than"):
        decode_request(too_many)
    impossible = encode_message(ReserveChunks((chunk(1),), 1.0)).replace(
        b"\xa6nbytes\xce\x00\x01\x00\x00", b"\xa6nbytes\xd2\xff\xff\x00\x00"
    )
    with pytest.raises(BadFrame, match="wanted a chunk with 1 byte"):
        decode_request(impossible)
    monkeypatch.setattr(store_messages, "_encoder", Garbage())
    monkeypatch.setattr("mooncake_kv.store.store_client.encode_message", lambda _: b"garbage")
    assert client.drop([b"key"]).result(WAIT_S) == 0
    monkeypatch.undo()
    assert client.stats().result(WAIT_S) is not None, "the session continues"


def test_reply_with_too_few_results_is_a_miss(served, client, monkeypatch):
    put(client, 1)
    monkeypatch.setattr(client, "_index", None)
    user = next(iter(served.service._users.values()))
    handle = user.handle

    def shortened(request):
        reply = handle(request)
        (name,) = reply.__struct_fields__
        return structs.replace(reply, **{name: getattr(reply, name)[1:]})

    monkeypatch.setattr(user, "handle", shortened)
    keys = [chunk(n).key for n in (1, 2)]
    assert client.probe(keys).result(WAIT_S) == [Residence.ABSENT] * 2
    assert client.pin(keys).result(WAIT_S) == [None] * 2
    assert client.release([]).result(WAIT_S) == []
    reserved = client.reserve([chunk(2), chunk(3)]).result(WAIT_S)
    assert reserved == [PutRefusal.UNREACHABLE] * 2
    assert not client._writing


def test_session_has_one_user(served, client):
    with pytest.raises(RequestRejected, match="another user has opened this session"):
        ask(client, OpenSession("other", b"other", 1.0, ()))
    assert ask(client, OpenSession("user", client._client, 1.0, ())).arena == client.arena
    assert list(served.service._clients) == [client._client]


def test_threads_of_a_user_are_bounded(served, client, monkeypatch):
    monkeypatch.setattr("mooncake_kv.store.store_service.MAX_OPERATIONS", 2)
    is_over = threading.Event()
    monkeypatch.setattr(served.store, "verify", lambda: (int(is_over.wait(WAIT_S)), 0))
    running = [ask(client, VerifyRecords()) for _ in range(2)]
    with pytest.raises(RequestRejected, match="2 requests of this user are being executed"):
        ask(client, VerifyRecords())
    assert [each.name for each in threading.enumerate()].count("store-operator") == 2
    is_over.set()
    for pending in running:
        while isinstance(reply := ask(client, Poll(pending.ticket)), Pending):
            pass
        assert reply == Verified(1, 0)
    assert client.verify().result(WAIT_S) == (1, 0)


def test_pending_replies_that_a_user_polls_no_more_are_dropped(served, client, monkeypatch):
    """Its call has timed out, say. They took one of the user's MAX_TICKETS for ever."""
    monkeypatch.setattr("mooncake_kv.store.store_service.MAX_TICKETS", 2)
    is_over = threading.Event()
    monkeypatch.setattr(served.store, "verify", lambda: (int(is_over.wait(WAIT_S)), 0))
    clock = [0.0]
    monkeypatch.setattr(
        "mooncake_kv.store.store_service.time", SimpleNamespace(monotonic=lambda: clock[0])
    )
    abandoned, polled = (ask(client, VerifyRecords()) for _ in range(2))
    clock[0] = ABANDONED_S - 1
    assert ask(client, Poll(polled.ticket)) == polled
    with pytest.raises(RequestRejected, match="2 have not been collected"):
        ask(client, VerifyRecords())
    clock[0] = ABANDONED_S
    assert isinstance(ask(client, VerifyRecords()), Pending)
    with pytest.raises(RequestRejected, match=f"no pending reply has ticket {abandoned.ticket}"):
        ask(client, Poll(abandoned.ticket))
    is_over.set()
    while isinstance(reply := ask(client, Poll(polled.ticket)), Pending):
        pass
    assert reply == Verified(1, 0)


def ask(client, request):
    """The store's reply to one message in the client's session."""
    asked = client._session.request(encode_message(request), timeout=WAIT_S)
    return decode_reply(client._loop.run(asked, WAIT_S))


class Garbage:
    def encode(self, message):
        return b"garbage"


@pytest.mark.parametrize("lease_s", [float("nan"), float("inf"), -5.0, 1e9])
def test_lease_duration_is_capped(client, lease_s):
    put(client, 7)
    (handle,) = client.pin([chunk(7).key], lease_s=lease_s).result(WAIT_S)
    assert 0 <= handle.lease_s <= 120


def client_threads():
    return [thread for thread in threading.enumerate() if thread.name == "store-client"]


@pytest.mark.parametrize("host", ["a..b", "x" * 70])
def test_invalid_host_is_a_miss_and_its_client_closes(host):
    client = StoreClient(StoreAddress(host, 7701, SECRET))
    assert not client.await_store(0.3)
    assert client.probe([b"key"]).result(WAIT_S) == [Residence.ABSENT]
    client.close()
    assert not client_threads()


def test_failed_client_resolves_pending_calls_as_misses_and_can_be_closed(
    served, client, monkeypatch, caplog
):
    never_answered = Future()
    monkeypatch.setattr(served.store, "verify", never_answered.result)
    waits = client.verify()
    try:
        client._loop.call("", lambda: client._loop.spawn_housekeeping(defect()))
        assert waits.result(WAIT_S) is None
    finally:
        never_answered.set_result((0, 0))
    assert client.probe([b"key"]).result(WAIT_S) == [Residence.ABSENT]
    client.close()
    assert not client_threads()
    assert "a store client failed" in caplog.text


async def defect():
    raise ZeroDivisionError


def stop_loop(client):
    loop = client._loop._loop
    loop.call_soon_threadsafe(loop.stop)


class WatchedLock:
    """A lock that tells when a second thread waits for it."""

    def __init__(self):
        self.is_wanted = threading.Event()
        self._lock = threading.Lock()

    def __enter__(self):
        if not self._lock.acquire(blocking=False):
            self.is_wanted.set()
            self._lock.acquire()

    def __exit__(self, *_):
        self._lock.release()


def test_call_that_becomes_pending_while_the_client_fails_is_a_miss(client, caplog):
    lock = client._lock = WatchedLock()

    class EndsLoop(dict):
        def __setitem__(self, future, miss):
            stop_loop(client)
            lock.is_wanted.wait(WAIT_S)
            super().__setitem__(future, miss)

    client._misses = EndsLoop()
    assert client.stats().result(WAIT_S) is None
    assert "a store client failed" in caplog.text


def test_call_whose_loop_ends_before_it_runs_is_a_miss(client, monkeypatch, caplog):
    """Also if it can't even be scheduled any more."""
    call = client._loop.call

    def late_call(*args):
        stop_loop(client)
        client._loop._thread.join(WAIT_S)
        call(*args)

    monkeypatch.setattr(client._loop, "call", late_call)
    assert client.stats().result(WAIT_S) is None
    assert "a store client failed" in caplog.text


def test_calls_beyond_the_sessions_limit_wait_for_a_slot(served, client, caplog):
    """Such calls once ended the session, and with it every read and write in flight."""
    put(client, 1)
    read = client.pin([chunk(1).key]).result(WAIT_S)
    written = client.reserve([chunk(2)]).result(WAIT_S)
    touches = [client.touch([chunk(1).key]) for _ in range(2 * LIMITS.outstanding)]
    assert client.release(read).result(WAIT_S) == [True]
    assert client.commit(written).result(WAIT_S) == [True]
    assert all(touch.result(WAIT_S) is None for touch in touches)
    assert served.store._table.entry(chunk(1).key).num_uses == 2 + len(touches)
    assert not caplog.messages


def test_store_without_replies_to_many_calls_is_disconnected(served, client, monkeypatch, caplog):
    monkeypatch.setattr(store_client, "REQUEST_TIMEOUT_S", 0.2)
    frozen = threading.Event()
    monkeypatch.setattr(served.store, "touch", lambda keys: frozen.wait(WAIT_S))
    asked = [client.touch([b"key"]) for _ in range(LIMITS.outstanding)]
    ended = client.release([])
    assert [each.result(WAIT_S) for each in asked] == [None] * len(asked)
    assert ended.result(WAIT_S) == []
    assert "all its chunks are misses until it is restored" in caplog.text
    frozen.set()


def test_calls_that_get_no_slot_in_time_are_misses_and_keep_the_session(
    served, client, monkeypatch, caplog
):
    """The store replies to all calls in time; reads and writes in flight continue and complete."""
    put(client, 1)
    read = client.pin([chunk(1).key]).result(WAIT_S)
    written = client.reserve([chunk(2)]).result(WAIT_S)
    monkeypatch.setattr(store_client, "REQUEST_TIMEOUT_S", 0.2)
    over, request = asyncio.Event(), AsyncSession.request

    async def slow(session, payload, *, timeout):
        reply = await request(session, payload, timeout=WAIT_S)
        await over.wait()
        return reply

    monkeypatch.setattr(AsyncSession, "request", slow)
    first = [client.touch([chunk(1).key]) for _ in range(LIMITS.outstanding)]
    late = client.stats()
    ends = client.release(read), client.commit(written)
    assert late.result(WAIT_S) is None
    assert not any(each.done() for each in (*first, *ends))
    client._loop.call("", over.set)
    assert [end.result(WAIT_S) for end in ends] == [[True], [True]]
    assert client.stats().result(WAIT_S).num_pins == 0
    assert not caplog.messages


def test_oversized_message_is_a_miss_and_keeps_the_session(served, client, caplog):
    put(client, 1)
    read = client.pin([chunk(1).key]).result(WAIT_S)
    assert client.drop([bytes(LIMITS.frame_bytes)]).result(WAIT_S) == 0
    assert client.release(read).result(WAIT_S) == [True]
    assert not caplog.messages


def test_drive_with_hung_writes_does_not_block_users(tmp_path, monkeypatch):
    """Not even a drive that hangs when a segment is started: a pin of its chunks, and every later
    call on the service's only loop, once waited for it."""
    drive = SsdDirectoryConfig(tmp_path, 12 * NBYTES, 4 * NBYTES, min_free_bytes=0)
    served = Served(ssd=SsdConfig((drive,), write_timeout_s=0.2))
    client, other = StoreClient(served.address), StoreClient(served.address)
    hangs, over, write = threading.Event(), threading.Event(), os.pwritev

    def hung(file, buffers, offset):
        if offset == 0:
            hangs.set()
            assert over.wait(WAIT_S)
        return write(file, buffers, offset)

    def use(*numbers):
        pinned = other.pin([chunk(number).key for number in numbers]).result(WAIT_S)
        return other.release([handle for handle in pinned if handle]).result(WAIT_S)

    try:
        assert client.await_store(WAIT_S)
        assert other.await_store(WAIT_S)
        put(client, 0)
        use(0)
        served.await_stats(ssd_chunks=1, num_pins=0)
        put(client, *range(1, 9))  # evicts it from memory
        monkeypatch.setattr(os, "pwritev", hung)
        use(1, 2, 3)
        assert hangs.wait(WAIT_S)
        served.await_stats(num_ssd_hung_writes=1)
        assert use(8) == [True]
        assert use(0) == [True], "it is read from the drive"
        assert other.stats().result(WAIT_S).num_ssd_hung_reads == 0
        assert other.arena is not None
    finally:
        over.set()
        for each in (client, other, served):
            each.close()
