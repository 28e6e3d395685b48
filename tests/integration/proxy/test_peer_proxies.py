"""Proxies on several hosts that share instances exchange their reservations."""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path

import httpx
import msgspec
import pytest
import uvloop
from support.ports import free_range
from support.proxy_conductor import conductor_of, settings
from support.proxy_fakes import FakeDeployment, fake_deployment
from support.proxy_fakes_client import BODY, post

from mooncake_api.instance_protocol import signed_head
from mooncake_conductor.policies.situation import Plan
from mooncake_proxy.config_from_options import config_from
from mooncake_proxy.errors import ConfigError
from mooncake_proxy.ops.worker_link import (
    PeerProxyMessage,
    WorkerLink,
    decode_message,
    encode_message,
)
from mooncake_proxy.proxy_options import build_parser
from mooncake_proxy.routing import peer_proxies
from mooncake_proxy.routing.conductor_fleet import OWNER
from mooncake_proxy.routing.peer_proxies import HEADER, PeerProxies
from mooncake_proxy.routing.reservation_sharing import ReservationReport

SECRET = "what these proxies share"
TIMEOUT_S = 60.0
UNREACHABLE = "http://127.0.0.1:1"
STREAM = BODY | {"prompt": list(range(640)), "stream": True}


def peered(url: str) -> dict[str, object]:
    """Settings of a proxy that sends its reservations to a peer."""
    return settings("cost", peers=(url,), peer_secret=SECRET)


def peers_of(s: FakeDeployment) -> PeerProxies:
    assert s.app.peers is not None
    return s.app.peers


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(int(TIMEOUT_S / 0.02)):
        if condition():
            return
        await asyncio.sleep(0.02)
    pytest.fail("it does not come about")


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_text(SECRET)
    return path


@asynccontextmanager
async def other_proxy(
    s: FakeDeployment, port: int, secret: Path
) -> AsyncIterator[asyncio.subprocess.Process]:
    """A proxy process over the same instances that exchanges reservations with the deployment's
    proxy."""
    flags = [part for fake in s.prefills for part in ("--prefill", fake.url)]
    flags += [part for fake in s.decodes for part in ("--decode", fake.url)]
    flags += ["--policy", "cost", "--peer-proxy", s.url, "--peer-secret-file", str(secret)]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "mooncake_proxy", "--port", str(port), *flags),
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        await asyncio.wait_for(process.stdout.readline(), TIMEOUT_S)
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@pytest.mark.timeout(120)
def test_peer_reservations_count_until_they_end(
    secret: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_proxies, "EXPIRE_S", 2.0)

    async def main() -> None:
        port = free_range(1).first
        url = f"http://127.0.0.1:{port}"
        async with (
            fake_deployment(2, 1, **peered(url)) as s,
            httpx.AsyncClient(timeout=TIMEOUT_S) as client,
        ):
            book = conductor_of(s).pairs.conductor.book
            for fake in s.prefills:
                fake.behaviour.hangs = True
            async with other_proxy(s, port, secret) as process:
                asked = asyncio.ensure_future(client.post(f"{url}/v1/completions", json=STREAM))
                await until(lambda: len(book) == 1)
                [made] = book._live.values()
                assert made.request.owner != OWNER
                # The same prompt waits for the prefix that is computed for the other proxy.
                own = asyncio.ensure_future(post(s, STREAM))
                await until(lambda: len(book) == 2)
                [first, second] = book._live.values()
                assert second.choice.plan is Plan.JOIN
                assert second.choice.slot == first.choice.slot
                for fake in s.prefills:
                    fake.behaviour.hangs = False
                process.send_signal(signal.SIGKILL)
                with pytest.raises(httpx.TransportError):
                    await asked
                own.cancel()
                await until(lambda: len(book) == 0)

    uvloop.run(main())


@pytest.mark.timeout(120)
def test_late_peer_receives_full_snapshot(secret: Path) -> None:
    """A peer that joins later receives all current reservations."""

    async def main() -> None:
        port = free_range(1).first
        url = f"http://127.0.0.1:{port}"
        async with (
            fake_deployment(1, 1, **peered(url)) as s,
            httpx.AsyncClient(timeout=TIMEOUT_S) as client,
        ):
            s.prefill.behaviour.hangs = True
            # Without a timeout, so that its reservation lives until the other proxy has started.
            own = asyncio.ensure_future(
                client.post(f"{s.url}/v1/completions", json=STREAM, timeout=None)
            )
            [peer] = peers_of(s)._peers
            await until(lambda: not peer.is_reached)
            async with other_proxy(s, port, secret):
                await until(lambda: peer.is_reached)
                headers = {"x-request-id": "probe"}
                probe = asyncio.ensure_future(
                    client.post(f"{url}/v1/completions", json=STREAM, headers=headers)
                )
                explain = f"{url}/conductor/explain?request=probe"
                while (answer := await client.get(explain)).status_code == 404:
                    assert not probe.done()
                assert answer.json()["prefill"]["plan"] == "join"
                assert not own.done()
                probe.cancel()
            own.cancel()

    uvloop.run(main())


async def _peer_message(s: FakeDeployment) -> ReservationReport:
    """A message as another process with this one's reservations would send it."""
    sharing = s.app.routers.share_reservations()
    assert sharing is not None
    [update] = sharing.snapshot()
    changes = bytes(update.changes).replace(OWNER.encode(), b"another")
    model_update = type(update)("another", update.model, update.is_whole, msgspec.Raw(changes))
    return ReservationReport("another", 0, updates=[model_update])


async def _send(
    s: FakeDeployment, message: ReservationReport, *, secret: str = SECRET, body: bytes = b""
) -> int:
    encoded = msgspec.json.encode(message)
    signed = signed_head(secret.encode(), f"{message.owner}.{message.number:x}", encoded)
    async with httpx.AsyncClient(base_url=s.url) as client:
        headers = {HEADER.decode(): signed}
        answer = await client.post(
            "/conductor/reservations", content=body or encoded, headers=headers
        )
    return answer.status_code


def test_unauthenticated_altered_and_replayed_messages_are_dropped() -> None:
    async def main() -> None:
        async with fake_deployment(1, 1, **peered(UNREACHABLE)) as s:
            s.prefill.behaviour.hangs = True
            own = asyncio.ensure_future(post(s, STREAM))
            book = conductor_of(s).pairs.conductor.book
            await until(lambda: len(book) == 1)
            report = await _peer_message(s)
            assert await _send(s, report, secret="another secret") == 403
            assert await _send(s, report, body=msgspec.json.encode(report) + b" ") == 403
            async with httpx.AsyncClient(base_url=s.url) as client:
                answer = await client.post("/conductor/reservations", json={})
                assert answer.status_code == 403
                assert "--peer-secret-file" in answer.json()["error"]["message"]
                assert (await client.get("/conductor/reservations")).status_code == 405
            assert len(book) == 1
            report.number = 5
            assert await _send(s, report) == 200
            assert len(book) == 2
            ended = ReservationReport("another", 6, begins_snapshot=True, ends_snapshot=True)
            assert await _send(s, ended) == 200
            assert len(book) == 1
            assert await _send(s, report) == 200, "a stale message is dropped without an error"
            assert len(book) == 1
            own.cancel()

    uvloop.run(main())


def test_snapshot_replaces_earlier_reservations() -> None:
    async def main() -> None:
        async with fake_deployment(1, 1, **peered(UNREACHABLE)) as s:
            s.prefill.behaviour.hangs = True
            own = asyncio.ensure_future(post(s, STREAM))
            book = conductor_of(s).pairs.conductor.book
            await until(lambda: len(book) == 1)
            report, peers = await _peer_message(s), peers_of(s)
            peers.apply(msgspec.json.encode(report))
            [kept] = [made for made in book._live.values() if made.request.owner == "another"]
            update = report.updates[0]
            more = bytes(update.changes).replace(b"another-", b"another-more-")
            second = type(update)("another", update.model, update.is_whole, msgspec.Raw(more))
            peers.apply(msgspec.json.encode(ReservationReport("another", 1, updates=[second])))
            assert len(book) == 3
            whole = ReservationReport(
                "another", 2, begins_snapshot=True, is_snapshot=True, updates=[update]
            )
            peers.apply(msgspec.json.encode(whole))
            assert len(book) == 3, "the snapshot is not complete"
            peers.apply(msgspec.json.encode(ReservationReport("another", 3, ends_snapshot=True)))
            assert len(book) == 2
            assert book.get(kept.request.request_id) is kept, "it was not replaced"
            own.cancel()

    uvloop.run(main())


def test_what_a_peer_of_another_release_sends_is_left_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> None:
        async with fake_deployment(1, 1, **peered(UNREACHABLE)) as s:
            s.prefill.behaviour.hangs = True
            own = asyncio.ensure_future(post(s, STREAM))
            book = conductor_of(s).pairs.conductor.book
            await until(lambda: len(book) == 1)
            report, peers = await _peer_message(s), peers_of(s)
            update = report.updates[0]
            known = bytes(update.changes)
            unknown = b'{"type":"resized","request_id":"another-x"}'

            def report_of(number: int, changes: bytes, **fields: object) -> bytes:
                rest = type(update)("another", update.model, update.is_whole, msgspec.Raw(changes))
                later = ReservationReport("another", number, updates=[rest], **fields)
                return msgspec.json.encode(later)

            peers.apply(report_of(0, b"[%b,%b" % (unknown, known[1:])))
            assert len(book) == 2
            peers.apply(report_of(1, unknown))
            named = {"begins_snapshot": True, "is_snapshot": True, "ends_snapshot": True}
            peers.apply(report_of(2, b"[%b]" % unknown, **named))
            assert len(book) == 2, "a snapshot that is not known in full ends nothing"
            peers.apply(report_of(3, b"[]", **named))
            assert len(book) == 1
            another = {"owner": "other", "number": 0, "version": 2, "updates": "of another kind"}
            for _ in range(2):
                peers.apply(msgspec.json.encode(another))
            said = [each for each in caplog.messages if "of another release" in each]
            assert [each.partition("(")[2] for each in said] == [
                *("version 1, here 1)", "version 2, here 1)")
            ]
            own.cancel()

    uvloop.run(main())


def test_reservations_of_silent_peer_expire(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("EXPIRE_S", "HEARTBEAT_S"):
        monkeypatch.setattr(peer_proxies, name, 0.1)

    async def main() -> None:
        async with fake_deployment(1, 1, **peered(UNREACHABLE)) as s:
            s.prefill.behaviour.hangs = True
            own = asyncio.ensure_future(post(s, STREAM))
            book = conductor_of(s).pairs.conductor.book
            await until(lambda: len(book) == 1)
            peers_of(s).apply(msgspec.json.encode(await _peer_message(s)))
            assert len(book) == 2
            await until(lambda: len(book) == 1)
            own.cancel()

    uvloop.run(main())


def test_own_message_does_not_expire_own_reservations(monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy gets its own messages if it is among its peers, as in one list for all proxies."""
    for name in ("EXPIRE_S", "HEARTBEAT_S"):
        monkeypatch.setattr(peer_proxies, name, 0.1)

    async def main() -> None:
        async with fake_deployment(1, 1, **peered(UNREACHABLE)) as s:
            s.prefill.behaviour.hangs = True
            own = asyncio.ensure_future(post(s, STREAM))
            book = conductor_of(s).pairs.conductor.book
            await until(lambda: len(book) == 1)
            peers_of(s).apply(msgspec.json.encode(ReservationReport(OWNER, 0)))
            peers_of(s).apply(msgspec.json.encode(await _peer_message(s)))
            await until(lambda: not book.of_owner("another"))
            assert len(book.of_owner(OWNER)) == 1
            own.cancel()

    uvloop.run(main())


PAIR = ["--prefill", "http://p:1", "--decode", "http://d:1"]


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--policy", "cost", "--peer-proxy", "http://b:8000"], "go together"),
        (["--peer-proxy", "http://b:8000"], "wanted --admission or a policy of the conductor"),
    ],
)
def test_peers_need_a_conductor_and_a_secret(flags: list[str], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        config_from(build_parser().parse_args([*PAIR, *flags]))


@pytest.mark.parametrize(
    ("text", "problem"),
    [("\n", "is empty"), ("x\n", "a secret of 1 bytes, .*at least 16; openssl rand -hex 32 makes")],
)
def test_guessable_secret_is_rejected(tmp_path: Path, text: str, problem: str) -> None:
    (tmp_path / "secret").write_text(text)
    flags = ["--policy", "cost", "--peer-proxy", "http://b:8000"]
    flags += ["--peer-secret-file", str(tmp_path / "secret")]
    with pytest.raises(ConfigError, match=problem):
        config_from(build_parser().parse_args([*PAIR, *flags]))


def test_worker_relays_peer_reservations_to_other_workers() -> None:
    async def main() -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        ours.setblocking(False)
        async with AsyncExitStack() as stack:
            s = await stack.enter_async_context(fake_deployment(1, 1, **peered(UNREACHABLE)))
            link = WorkerLink(0, theirs)
            link.open(s.app.routers, s.app.admission, s.app.process.tenants.limits)
            stack.callback(ours.close)
            stack.callback(link.close)
            s.app._link = link
            stack.callback(setattr, s.app, "_link", None)
            s.app._start_peer_exchange(asyncio.get_running_loop())
            s.prefill.behaviour.hangs = True
            own = asyncio.ensure_future(post(s, STREAM))
            book = conductor_of(s).pairs.conductor.book
            await until(lambda: len(book) == 1)
            report = await _peer_message(s)
            with suppress(BlockingIOError):  # its own reservation, which workers exchange
                while ours.recv(1 << 20):
                    pass
            assert await _send(s, report) == 200
            await until(lambda: len(book) == 2)
            passed_on = decode_message(ours.recv(1 << 20))
            assert isinstance(passed_on, PeerProxyMessage)
            again = msgspec.json.decode(bytes(passed_on.body), type=ReservationReport)
            again.number, again.begins_snapshot, again.ends_snapshot, again.updates = (
                9,
                True,
                True,
                [],
            )
            ours.send(encode_message(PeerProxyMessage(msgspec.Raw(msgspec.json.encode(again)))))
            await until(lambda: len(book) == 1)
            own.cancel()

    uvloop.run(main())
