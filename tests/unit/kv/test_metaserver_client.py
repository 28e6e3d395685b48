"""Which metaservers may be posted to, and which of their answers are accepted."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable

import pytest

from mooncake_kv import metaserver_client
from mooncake_kv.errors import KVConfigError, KVTransferError
from mooncake_kv.metaserver_client import MetaserverRule, RequestMetaserver, post_params

ANYBODY = MetaserverRule(())
LOOPBACK = "127.0.0.1"


def post_to(answer: bytes, rule: MetaserverRule = ANYBODY, requester: str | None = None) -> int:
    """Post to a server with this response; returns the number of connections it got."""
    num_connections = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_connections
        num_connections += 1
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        writer.close()

    async def main() -> None:
        server = await asyncio.start_server(serve, LOOPBACK, 0)
        port = server.sockets[0].getsockname()[1]
        try:
            await post_params(RequestMetaserver(f"http://{LOOPBACK}:{port}/x", requester), {}, rule)
        finally:
            server.close()
            await server.wait_closed()

    asyncio.run(main())
    return num_connections


OK = b"HTTP/1.1 202 Accepted\r\nContent-Length: 0\r\n\r\n"


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 202 Accepted\r\nX: " + b"a" * 100_000 + b"\r\n\r\n",
        b"a" * 1_000_000,
        b"",
        b"HTTP/1.1 \r\n\r\n",
        b"\xff\xfe\r\n\r\n",
        b"HTTP/1.1 202",
        b"HTTP/1.1 302 Found\r\nLocation: http://elsewhere/\r\n\r\n",
        b"HTTP/1.1 500 Oops\r\n\r\n" + b"x" * 1_000_000,
    ],
    ids=["long head", "no end", "nothing", "no status", "no text", "half", "elsewhere", "long"],
)
def test_invalid_metaserver_response_fails_request_with_reason(answer: bytes) -> None:
    with pytest.raises(KVTransferError) as found:
        post_to(answer)
    assert len(str(found.value)) < 2_000


def test_requesting_host_may_be_posted_to() -> None:
    assert post_to(OK, requester=LOOPBACK) == 1
    assert post_to(OK, requester="::ffff:127.0.0.1") == 1


def test_other_host_may_not_be_posted_to() -> None:
    with pytest.raises(KVTransferError, match=r"came from 198\.51\.100\.7.*--metaserver-allow 127"):
        post_to(OK, requester="198.51.100.7")


@pytest.mark.parametrize("allowed", ["127.0.0.1", "127.0.0.0/8", "*"])
def test_allowed_hosts_are_posted_to(allowed: str) -> None:
    rule = MetaserverRule(["proxy.example", allowed])
    assert post_to(OK, rule, requester="198.51.100.7") == 1


@pytest.mark.parametrize("allowed", ["10.0.0.0/8", "proxy.example", "::1"])
def test_hosts_outside_allow_list_are_rejected(allowed: str) -> None:
    with pytest.raises(KVTransferError, match="is not allowed"):
        post_to(OK, MetaserverRule([allowed]), requester=LOOPBACK)


def test_name_outside_allow_list_is_not_resolved(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name server may take long, and a request may name any."""
    resolved: list[str] = []
    monkeypatch.setattr(metaserver_client, "addresses_of", resolved.append)
    metaserver = RequestMetaserver("http://elsewhere.example/x", LOOPBACK)
    with pytest.raises(KVTransferError, match=r"elsewhere\.example is not allowed"):
        asyncio.run(post_params(metaserver, {}, MetaserverRule(["proxy.example"])))
    assert resolved == []


@pytest.mark.parametrize("allowed", ["10.0.0.0/99", ""])
def test_invalid_allow_list_entries_fail_at_start(allowed: str) -> None:
    with pytest.raises(KVConfigError, match="--metaserver-allow wants"):
        MetaserverRule([allowed])


@pytest.mark.parametrize(
    ("address", "requester", "is_permitted"),
    [
        ("127.0.0.1", "127.0.0.2", True),  # both are addresses of this host
        ("192.0.2.1", "192.0.2.1", True),
        ("192.0.2.1", "198.51.100.7", False),
        ("169.254.169.254", "127.0.0.1", False),
        ("127.0.0.1", "198.51.100.7", False),
        ("127.0.0.1", "testclient", False),
        ("127.0.0.1", None, True),
    ],
)
def test_all_addresses_of_requesting_host_are_allowed(
    address: str, requester: str | None, is_permitted: bool
) -> None:
    permits: Callable[..., Awaitable[bool]] = ANYBODY.permits

    async def main() -> bool:
        return await permits("name", address, requester)

    assert asyncio.run(main()) is is_permitted


def test_host_names_are_case_insensitive() -> None:
    rule = MetaserverRule(["Proxy.Example"])
    assert asyncio.run(rule.permits("proxy.example", "192.0.2.1", "192.0.2.9"))


def test_tls_context_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading this host's certificates takes the loop that renews leases 30 ms."""
    made, make = list[ssl.SSLContext](), ssl.create_default_context

    def note_made() -> ssl.SSLContext:
        made.append(make())
        return made[-1]

    metaserver_client._tls_context.cache_clear()
    monkeypatch.setattr(ssl, "create_default_context", note_made)
    for _ in range(2):
        with pytest.raises(KVTransferError, match="failed"):
            asyncio.run(post_params(RequestMetaserver("https://127.0.0.1:9/x"), {}, ANYBODY))
    assert len(made) == 1
