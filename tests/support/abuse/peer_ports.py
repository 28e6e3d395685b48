"""Attacks by anyone who reaches the ports between instances, or an instance behind the proxy."""

from __future__ import annotations

import asyncio
import base64
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from support.abuse.attack import Attack, Attempts, Target
from support.abuse.verdicts import MIB, Bounds
from support.abuse.wire import (
    CHUNK_BYTES,
    CONNECT_S,
    ENDED,
    address,
    connection,
    read_all,
    request,
    send_forever,
)
from support.programs import descendants

from mooncake_hal.errors import TransferError
from mooncake_hal.session.aio import connect
from mooncake_hal.transports.session_endpoint import SessionAddress
from mooncake_hal.transports.tcp.tcp_sockets import TcpAddress
from mooncake_kv.pool.hinted_stores import MAX_HINTED_STORES
from mooncake_kv.side_channel import credentials_of

HELD = 100
"""Concurrent silent connections per port."""
MEMBER_S = 5.0
READ_S = 20.0
LAST = {"connection": "close"}
INSTANCES = ("prefill-0", "prefill-1", "decode-0", "decode-1")
ASK = {"prompt": "hello world", "max_tokens": 3, "temperature": 0}


@dataclass(frozen=True, slots=True)
class PeerPort:
    """A port of an instance for other instances.

    Args:
        protocol: the protocol spoken there.
        where: host and port, or the name of an abstract socket.
    """

    protocol: str
    where: tuple[str, int] | str

    def open(self) -> socket.socket:
        """Connect; raises OSError."""
        if isinstance(self.where, tuple):
            return socket.create_connection(self.where, CONNECT_S)
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(CONNECT_S)
        try:
            sock.connect(f"\0{self.where}")
        except OSError:
            sock.close()
            raise
        return sock


def peer_ports(target: Target) -> list[PeerPort]:
    """Side channels and transports of all instances."""
    found = []
    for topology in target.topologies.values():
        found.append(PeerPort("side channel", (topology["host"], topology["port"])))
        for rank in topology["ranks"]:
            found += [_peer_port(name, data) for name, data in rank["endpoints"].items()]
    return found


def _peer_port(name: str, data: str) -> PeerPort:
    raw = base64.b64decode(data)
    if name == "tcp":
        tcp = msgspec.msgpack.decode(raw, type=TcpAddress)
        return PeerPort(name, (tcp.host, tcp.port))
    other = msgspec.msgpack.decode(raw, type=SessionAddress)
    return PeerPort(name, (other.host, other.port) if other.port else other.host)


def check_members_get_in(target: Target, attempts: Attempts) -> None:
    """Check that a member can still connect to every side channel during the attack."""
    for topology in target.topologies.values():
        where = topology["host"], topology["port"]
        timeout = MEMBER_S * target.slack

        async def enter(host: str, port: int, timeout: float = timeout) -> None:
            (await connect(host, port, credentials_of(target.secret), timeout=timeout)).close("")

        try:
            asyncio.run(enter(*where))
        except TransferError as exc:
            attempts.complain(f"a member could not connect to {where}: {exc}")


def silent_handshakes(target: Target, attempts: Attempts) -> None:
    """Silent connections to every port between instances."""
    found = peer_ports(target)
    while not attempts.is_over:
        with ExitStack() as stack:
            for number in attempts:
                with suppress(*ENDED):
                    stack.enter_context(found[number % len(found)].open())
                if number >= HELD * len(found):
                    break
            check_members_get_in(target, attempts)


def slow_handshakes(target: Target, attempts: Attempts) -> None:
    """More concurrent byte-by-byte handshakes than are allowed."""
    found = peer_ports(target)
    with ExitStack() as stack:
        socks: list[socket.socket] = []
        for number in range(80 * len(found)):
            with suppress(*ENDED):
                socks.append(stack.enter_context(found[number % len(found)].open()))
        whole = (4000).to_bytes(4, "big") + b"x" * 4000
        for number in attempts:
            with suppress(*ENDED):
                socks[number % len(socks)].send(whole[number % 4 : number % 4 + 1])
            if number % 500 == 499:
                check_members_get_in(target, attempts)
            time.sleep(0.001)


def endless_frames(target: Target, attempts: Attempts) -> None:
    """Frames that announce gigabytes, frames of the maximum size, and endless frames."""
    found = peer_ports(target)
    allowed = (4096).to_bytes(4, "big") + b"x" * 4096
    heads = (b"\xff\xff\xff\xff", (16 << 20).to_bytes(4, "big"), b"\0\0\0\0", allowed)
    for number in attempts:
        start = heads[number // len(found) % len(heads)]
        with suppress(*ENDED), found[number % len(found)].open() as sock:
            sock.sendall(start)
            piece = start * 256 if start[:1] == b"\0" else b"x" * CHUNK_BYTES
            sent = send_forever(sock, piece, attempts, 64 * MIB)
            if sent >= 64 * MIB:
                attempts.complain(f"{found[number % len(found)]} accepted {sent >> 20} MiB")


def wrong_proofs(target: Target, attempts: Attempts) -> None:
    """Well-formed handshakes without knowledge of the secret."""

    async def enter(host: str, port: int, secret: bytes) -> None:
        (await connect(host, port, credentials_of(secret), timeout=CONNECT_S)).close("")

    secrets = (b"", b"wrong", target.secret + b"\n", target.secret[:-1])
    places = [(each["host"], each["port"]) for each in target.topologies.values()]
    for number in attempts:
        where = places[number % len(places)]
        with suppress(TransferError):
            asyncio.run(enter(*where, secrets[number % len(secrets)]))
            attempts.complain(f"{where} accepted a peer without the secret")


def unknown_peers(target: Target, attempts: Attempts) -> None:
    """Requests sent directly to an instance, each naming another unknown peer."""
    with ExitStack() as stack:
        for number in attempts:
            params = {
                "do_remote_prefill": True,
                "remote_engine_id": f"unknown-{number}",
                "remote_request_id": f"unknown-{number}",
                "remote_host": f"127.0.{number % 200}.{number // 200 % 200 + 1}",
                "remote_port": 1 + number % 1000,
                "remote_block_ids": [[0]],
                "remote_block_size": 16,
                "last_token_id": 5,
            }
            asked = {**ASK, "prompt": [5] * 12, "timeout": 5, "kv_transfer_params": params}
            with suppress(*ENDED):
                sock = stack.enter_context(connection(address(target.decodes[number % 2])))
                sock.sendall(request("/v1/completions", target.headers, asked))
            if number % 200 == 199:
                time.sleep(min(0.5, max(0.0, attempts.left_s)))
                stack.close()


UNNAMEABLE = ("a..b", "x" * 70, "10.0.0.1\0", "\u00e9" * 70, ".", "")
"""Hosts that no name server can be asked for; requests that name them must be rejected."""
MAX_NEW_THREADS = MAX_HINTED_STORES + 24
"""Maximum number of new threads in an instance that receives store hints: one for each store that
it connects to, and a few for name look-ups."""


def made_up_stores(target: Target, attempts: Attempts) -> None:
    """Requests sent directly to an instance that name stores on invalid or unused hosts."""
    before = {name: num_threads(target, name) for name in INSTANCES}
    for number in attempts:
        is_nameable = number % 2
        host = f"127.0.{number % 250}.1" if is_nameable else UNNAMEABLE[number // 2 % 6]
        source = {"host": host, "port": 1 + number % 1000, "epoch": f"{number}", "num_tokens": 512}
        prompt = [5 + number % 250, *[5] * 300]
        asked = {**ASK, "prompt": prompt, "max_tokens": 1}
        asked["kv_transfer_params"] = {"prefix_sources": [source] * 16}
        url = target.instances[number % len(target.instances)]
        with connection(address(url)) as sock:
            sock.sendall(request("/v1/completions", {**target.headers, **LAST}, asked))
            status = read_all(sock, READ_S * target.slack)[9:12]
        if status != (b"200" if is_nameable else b"400"):
            attempts.complain(f"a store at {host[:20]!r}: {status!r}")
    for name in INSTANCES:
        grown = num_threads(target, name) - before[name]
        if grown > MAX_NEW_THREADS:
            attempts.complain(f"{name} has {grown} more threads, the limit is {MAX_NEW_THREADS}")


def num_threads(target: Target, name: str) -> int:
    """Threads of a program and its children."""
    pids = [target.pids[name], *descendants(target.pids[name])]
    return sum(len(list(Path(f"/proc/{pid}/task").iterdir())) for pid in pids)


ANSWERS = (
    b"HTTP/1.1 202 X\r\nx: " + b"y" * 100_000,
    b"HTTP/1.1 202 X\r\n" + b"a: b\r\n" * 50_000 + b"content-length: 0\r\n\r\n",
    b"HTTP/1.1 200 X\r\ncontent-length: 99999999999\r\n\r\n" + b"x" * 5_000_000,
    b"HTTP/1.1 302 X\r\nlocation: http://127.0.0.1:1/\r\ncontent-length: 0\r\n\r\n",
    b"HTTP/1.1 500 X\r\ncontent-length: 5\r\n\r\n\xff\xfe\r\n\0",
    b"\0" * 100_000,
    b"HTTP/1.1 202 X\r\ncontent-length: -1\r\n\r\n",
    b"HTTP/1.1 202 X\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
    b"",
)
"""Invalid answers of a metaserver; the last one is silence on an open connection."""


def metaserver_urls(target: Target, attempts: Attempts) -> None:
    """Requests sent directly to a decode instance that name a misbehaving metaserver."""
    stop = threading.Event()
    with socket.create_server(("127.0.0.1", 0), backlog=512) as listener:
        serving = threading.Thread(target=partial(_answer_amiss, listener, stop))
        serving.start()
        host, port = listener.getsockname()
        urls = (
            *[f"http://{host}:{port}/v1/metaserver/{i}" for i in range(20)],
            *("http://127.0.0.1:1/", "https://127.0.0.1/", "file:///etc/passwd", "http://[::1"),
            *("http://" + "a" * 400, "http://169.254.169.254/latest", "x", "http://\udcff"),
        )
        with ExitStack() as stack:
            for number in attempts:
                params = {"do_remote_prefill": True, "metaserver": urls[number % len(urls)]}
                asked = {**ASK, "timeout": 5, "kv_transfer_params": params}
                with suppress(*ENDED):
                    sock = stack.enter_context(connection(address(target.decodes[number % 2])))
                    sock.sendall(request("/v1/completions", target.headers, asked))
                if number % 50 == 49:
                    time.sleep(min(0.5, max(0.0, attempts.left_s)))
                    stack.close()
        stop.set()
        serving.join()


def _answer_amiss(listener: socket.socket, stop: threading.Event) -> None:
    listener.settimeout(0.1)
    with ExitStack() as stack:
        for answer in _for_ever(ANSWERS):
            if stop.is_set():
                return
            with suppress(*ENDED):
                sock, _ = listener.accept()
                stack.enter_context(sock)
                read_all(sock, 0.05)
                sock.settimeout(0.5)
                sock.sendall(answer)
                if answer:
                    sock.close()


def _for_ever(answers: tuple[bytes, ...]) -> Iterator[Any]:
    while True:
        yield from answers


BOTH = ("pull", "push")
ATTACKS = (
    Attack("silent-handshakes", "Silent connections between instances", silent_handshakes),
    Attack("slow-handshakes", "Handshakes byte by byte", slow_handshakes, connectors=BOTH),
    Attack("endless-frames", "Frames without end", endless_frames, connectors=BOTH),
    Attack("wrong-proofs", "Handshakes without the secret", wrong_proofs, connectors=BOTH),
    Attack(
        "unknown-peers",
        "Requests to an instance that name made-up peers",
        unknown_peers,
        bounds=Bounds(growth_mib=128),
        max_attempts=10_000,
    ),
    Attack(
        "made-up-stores",
        "Requests to an instance that name made-up stores",
        made_up_stores,
        bounds=Bounds(growth_mib=128),
        connectors=BOTH,
    ),
    Attack(
        "metaserver-urls",
        "Requests to an instance that name made-up metaservers",
        metaserver_urls,
        bounds=Bounds(growth_mib=128),
        connectors=("push",),
    ),
)
