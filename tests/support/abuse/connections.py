"""Attacks by anyone who reaches an HTTP port, with or without a key, through connections."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress

import httpx
from support.abuse.attack import Attack, Attempts, Target
from support.abuse.verdicts import MIB, Bounds
from support.abuse.wire import (
    CHUNK_BYTES,
    CONNECT_S,
    ENDED,
    address,
    connection,
    head,
    read_all,
    request,
    send_forever,
)

FLOOD = 1500
"""Concurrent connections; each takes a descriptor at either end."""
TIMEOUT_S = 5.0
ASK = {"prompt": "hello world", "max_tokens": 4, "temperature": 0}


def http_ports(target: Target) -> Sequence[tuple[str, int]]:
    """URLs of the proxy and of one instance of each role."""
    return [address(url) for url in (target.proxy, target.prefills[0], target.decodes[0])]


def unread_pipeline(target: Target, attempts: Attempts) -> None:
    """Megabytes of pipelined requests whose answers are never read."""
    piece = head("/metrics", {}, "GET") * 2000
    for number in attempts:
        with suppress(*ENDED), connection(http_ports(target)[number % 3]) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            send_forever(sock, piece, attempts, 4 * MIB)


def never_reading(target: Target, attempts: Attempts) -> None:
    """Clients that request long streams and large pages and never read them, 200 per second."""
    body = {**ASK, "max_tokens": 512, "stream": True, "ignore_eos": True, "n": 4}
    with ExitStack() as stack:
        for number in attempts:
            with suppress(*ENDED):
                sock = stack.enter_context(connection(address(target.proxy)))
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                if number % 4:
                    sock.sendall(head("/metrics", {}, "GET"))
                else:
                    sock.sendall(request("/v1/completions", target.headers, body))
            if number % 100 == 99:
                time.sleep(min(0.5, max(0.0, attempts.left_s)))
                stack.close()


def endless_trailers(target: Target, attempts: Attempts) -> None:
    """Chunked bodies whose trailers never end, or pretend to contain the key."""
    fields = {"transfer-encoding": "chunked", **target.headers}
    for number in attempts:
        with suppress(*ENDED), connection(http_ports(target)[number % 3]) as sock:
            sock.sendall(head("/v1/completions", fields) + b"2\r\n{}\r\n0\r\n")
            piece = b"x" * CHUNK_BYTES if number % 2 else b"a: b\r\n" * 20_000
            send_forever(sock, piece, attempts, 64 * MIB)


def endless_extensions(target: Target, attempts: Attempts) -> None:
    """Endless chunk extensions and one-byte chunks."""
    fields = {"transfer-encoding": "chunked", **target.headers}
    for number in attempts:
        with suppress(*ENDED), connection(http_ports(target)[number % 3]) as sock:
            sock.sendall(head("/v1/completions", fields))
            piece = b"1;" + b"x" * CHUNK_BYTES if number % 2 else b"1\r\n[\r\n" * 100_000
            send_forever(sock, piece, attempts, 32 * MIB)


def bodies_without_key(target: Target, attempts: Attempts) -> None:
    """Large bodies from clients without a key, of which nothing may be buffered."""
    length = 60 * MIB
    for number in attempts:
        with ExitStack() as stack, suppress(*ENDED):
            for _ in range(5):
                sock = stack.enter_context(connection(address(target.proxy)))
                path = ("/v1/completions", "/v1/chat/completions", "/tokenize")[number % 3]
                sock.sendall(head(path, {"content-length": str(length)}))
                send_forever(sock, b"x" * CHUNK_BYTES, attempts, 40 * MIB)
                sock.settimeout(TIMEOUT_S * target.slack)
                with suppress(*ENDED):
                    if b" 401 " not in (answer := sock.recv(4096))[:20] and answer:
                        attempts.complain(f"expected 401, got {answer[:80]!r}")


def many_headers(target: Target, attempts: Attempts) -> None:
    """Heads with tens of thousands of fields, and heads of many megabytes."""
    for number in attempts:
        with suppress(*ENDED), connection(http_ports(target)[number % 3]) as sock:
            sock.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n")
            small = b"".join(b"x-%d: 1\r\n" % i for i in range(60_000))
            piece = b"x" * CHUNK_BYTES if number % 2 else small
            send_forever(sock, piece, attempts, 60 * MIB)


def slow_requests(target: Target, attempts: Attempts) -> None:
    """Heads and bodies sent byte by byte on hundreds of connections."""
    whole = request("/v1/completions", target.headers, ASK)
    with ExitStack() as stack:
        socks: list[socket.socket] = []
        for number in attempts:
            if number < 300:
                with suppress(*ENDED):
                    sock = stack.enter_context(connection(http_ports(target)[number % 3]))
                    sock.settimeout(1.0)
                    socks.append(sock)
                continue
            sent = (number - 300) // max(len(socks), 1)
            if not socks or sent >= len(whole) - 1:
                return
            with suppress(*ENDED):
                socks[number % len(socks)].send(whole[sent : sent + 1])
            time.sleep(0.001)


def idle_flood(target: Target, attempts: Attempts) -> None:
    """Thousands of connections that stay silent or disconnect at once."""
    while not attempts.is_over:
        with ExitStack() as stack:
            for number in attempts:
                with suppress(*ENDED):
                    sock = socket.create_connection(http_ports(target)[number % 3], CONNECT_S)
                    if number % 3:
                        stack.enter_context(sock)
                    else:
                        sock.close()
                if number >= FLOOD:
                    break
            time.sleep(max(0.0, min(1.0, attempts.left_s)))


def cleartext_http2(target: Target, attempts: Attempts) -> None:
    """Requests that offer h2c, as JDK's client and curl do; they must be served over HTTP/1.1."""
    fields = {
        "connection": "Upgrade, HTTP2-Settings, close",
        "upgrade": "h2c",
        "http2-settings": "AAMAAABkAARAAAAAAAIAAAAA",
    }
    prior_knowledge = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
    for number in attempts:
        with suppress(*ENDED), connection(address(target.proxy)) as sock:
            if number % 3 == 2:
                sock.sendall(prior_knowledge)
                read_all(sock, 1.0)
                continue
            body = number % 3 == 0
            whole = request("/v1/completions", {**fields, **target.headers}, ASK)
            sock.sendall(whole if body else head("/health", fields, "GET"))
            answer = read_all(sock, TIMEOUT_S * target.slack)
            if not answer.startswith(b"HTTP/1.1 200"):
                attempts.complain(f"an offer of h2c got {answer[:80]!r}")


def pipelined_continue(target: Target, attempts: Attempts) -> None:
    """``Expect: 100-continue`` after a request whose answer is still being streamed."""
    body = {**ASK, "max_tokens": 32, "stream": True, "ignore_eos": True}
    fields = {"expect": "100-continue", "connection": "close", "content-length": "2"}
    for _ in attempts:
        with suppress(*ENDED), connection(address(target.proxy)) as sock:
            sock.sendall(request("/v1/completions", target.headers, body))
            sock.sendall(head("/v1/completions", {**target.headers, **fields}) + b"{}")
            answer = read_all(sock, TIMEOUT_S * target.slack)
            before, found, _after = answer.partition(b"HTTP/1.1 100 Continue")
            if found and not before.endswith(b"0\r\n\r\n"):
                attempts.complain(f"100 Continue inside an answer: {before[-60:]!r}")


def odd_requests(target: Target, attempts: Attempts) -> None:
    """Path traversal, missing and duplicate hosts, unknown methods and versions."""
    key = f"authorization: {target.headers['authorization']}\r\n".encode()
    lines = (
        b"GET /v1/models/../../metrics HTTP/1.1\r\nhost: x\r\n",
        b"GET /v1/models/%2e%2e/%2e%2e/abort HTTP/1.1\r\nhost: x\r\n",
        b"POST /abort HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n",
        b"POST /reset_prefix_cache HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n",
        b"POST /instances HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n",
        b"GET /v1/models HTTP/1.1\r\n",
        b"GET /v1/models HTTP/1.1\r\nhost: x\r\nhost: y\r\n",
        b"CONNECT x:1 HTTP/1.1\r\nhost: x\r\n",
        b"TRACE / HTTP/1.1\r\nhost: x\r\n",
        b"GET http://elsewhere/ HTTP/1.1\r\nhost: x\r\n",
        b"POST /v1/metaserver/0123456789abcdef HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n",
    )
    for number in attempts:
        with suppress(*ENDED), connection(address(target.proxy)) as sock:
            sock.sendall(lines[number % len(lines)] + key + b"connection: close\r\n\r\n{}")
            answer = read_all(sock, TIMEOUT_S)
            if number % len(lines) < 5 and answer.startswith(b"HTTP/1.1 2"):
                attempts.complain(f"{lines[number % len(lines)][:50]!r} got {answer[:40]!r}")


def leaving_clients(target: Target, attempts: Attempts) -> None:
    """Long requests whose clients disconnect at once, queued behind each other."""
    body = {**ASK, "prompt": [5] * 1500, "max_tokens": 400, "ignore_eos": True}
    with ExitStack() as stack:
        for number in attempts:
            asked = {**body, "stream": bool(number % 2), "timeout": 1e6, "prompt": [number % 250]}
            asked["prompt"] = asked["prompt"] * 1500
            with suppress(*ENDED):
                sock = stack.enter_context(connection(address(target.proxy)))
                sock.sendall(request("/v1/completions", target.headers, asked))
            if number % 50 == 49:
                time.sleep(0.1)
                stack.close()


def wrong_keys(target: Target, attempts: Attempts) -> None:
    """Keys that are missing, wrong, long, or not text."""
    keys = ("", "Bearer", "Bearer " + "x" * 60_000, "Basic YTpi", "Bearer \xff", "bearer a-client")
    for number in attempts:
        with suppress(*ENDED), connection(http_ports(target)[number % 3]) as sock:
            fields = {"authorization": keys[number % len(keys)], "connection": "close"}
            sock.sendall(request("/v1/completions", fields, ASK))
            answer = read_all(sock, TIMEOUT_S)
            if answer.startswith(b"HTTP/1.1 2"):
                attempts.complain(f"accepted the key {keys[number % len(keys)][:30]!r}")


def scraped_pages(target: Target, attempts: Attempts) -> None:
    """The pages that need no key, requested in a tight loop."""
    paths = ("/", "/view", "/metrics", "/health", "/ready", "/kv/topology", "/openapi.json")
    with httpx.Client(timeout=30.0 * target.slack, trust_env=False) as client:
        for number in attempts:
            url = (target.proxy, *target.instances)[number % 5]
            with suppress(httpx.HTTPError):
                if client.get(url + paths[number % len(paths)]).status_code >= 500:
                    attempts.complain(f"{url}{paths[number % len(paths)]} failed")


SMALL = Bounds(growth_mib=32)
"""Bounds of attacks whose data is rejected unread."""
ATTACKS = (
    Attack("unread-pipeline", "Pipelined requests whose answers nobody reads", unread_pipeline),
    Attack("never-reading", "Clients that never read their answers", never_reading),
    Attack("endless-trailers", "Trailers without end", endless_trailers, SMALL),
    Attack("endless-extensions", "Chunk extensions and tiny chunks", endless_extensions),
    Attack("bodies-without-key", "Large bodies of clients without a key", bodies_without_key),
    Attack("many-headers", "Heads of many fields and megabytes", many_headers, SMALL),
    Attack("slow-requests", "Requests byte by byte", slow_requests),
    Attack("idle-flood", "Connections by the thousand", idle_flood, bounds=Bounds(growth_mib=96)),
    Attack("cleartext-http2", "Offers of h2c", cleartext_http2),
    Attack("pipelined-continue", "100-continue behind a stream", pipelined_continue),
    Attack("odd-requests", "Paths, hosts and methods that are odd", odd_requests),
    Attack("leaving-clients", "Clients that leave long requests", leaving_clients),
    Attack("wrong-keys", "Keys that are none", wrong_keys),
    Attack("scraped-pages", "Pages without a key, in a tight loop", scraped_pages),
)
