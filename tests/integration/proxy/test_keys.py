"""API keys: request bodies without a valid key are not read, and keys are forwarded to
instances."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest
import uvloop
from support.proxy_fakes import FakeDeployment, fake_deployment, text_of
from support.proxy_fakes_client import BODY

KEYS = {"api_keys": frozenset({"secret"}), "admin_keys": frozenset({"admin"})}
WITH_KEY = "authorization: Bearer secret\r\n"


async def begin_post(
    s: FakeDeployment, path: str, headers: str = "", num_bytes: int = 30_000_000
) -> bytes:
    """The response to headers that announce a large body, of which only a little is sent."""
    reader, writer = await asyncio.open_connection("127.0.0.1", s.app.port)
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\n{headers}content-length: {num_bytes}\r\n\r\n"
    writer.write(head.encode() + b"{" * 10_000)
    reply = await asyncio.wait_for(reader.read(), 5)
    writer.transport.abort()
    return reply


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/v1/completions", 401),
        ("/v1/chat/completions?x=1", 401),
        ("/tokenize", 401),
        ("/instances", 401),
        ("/v1/metaserver/guess", 404),
        ("/health", 413),
        ("/nowhere", 413),
    ],
)
def test_body_without_valid_key_is_not_read(path: str, status: int) -> None:
    async def main() -> None:
        async with fake_deployment(**KEYS) as s:
            reply = await begin_post(s, path)
            assert reply.startswith(b"HTTP/1.1 %d " % status), reply
            assert b"connection: close" in reply
            if path == "/v1/completions":
                assert s.count("requests", path, "401") == 1

    uvloop.run(main())


def test_body_with_valid_key_is_read() -> None:
    async def main() -> None:
        async with fake_deployment(**KEYS) as s:
            body = json.dumps(BODY | {"user": "u" * 200_000}).encode()
            reader, writer = await asyncio.open_connection("127.0.0.1", s.app.port)
            head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\n{WITH_KEY}"
            writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
            reply = await reader.readuntil(text_of(5).encode())
            assert reply.startswith(b"HTTP/1.1 200 ")
            writer.transport.abort()

    uvloop.run(main())


async def get(s: FakeDeployment, path: str) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", s.app.port)
    head = f"GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n{WITH_KEY}\r\n"
    writer.write(head.encode())
    reply = await asyncio.wait_for(reader.read(), 5)
    writer.close()
    return reply


def test_key_is_forwarded_with_model_listing() -> None:
    async def main() -> None:
        async with fake_deployment(**KEYS) as s:
            assert (await get(s, "/v1/models")).startswith(b"HTTP/1.1 200 ")
            asked = [seen for seen in s.decode.seen if seen.path == "/v1/models"]
            assert [seen.headers.get("authorization") for seen in asked] == ["Bearer secret"]

    uvloop.run(main())


@pytest.mark.parametrize("path", ["/v1/models/../../metrics", "/v1/models/a/%2e%2e/x"])
def test_model_path_cannot_escape_models_prefix(path: str) -> None:
    async def main() -> None:
        async with fake_deployment(**KEYS) as s:
            assert (await get(s, path)).startswith(b"HTTP/1.1 404 ")
            assert not s.decode.seen

    uvloop.run(main())


async def sent_to_instances(
    s: FakeDeployment, body: dict[str, object], key: str
) -> list[dict[str, object]]:
    """The bodies that P and D received for one request."""
    async with httpx.AsyncClient(base_url=s.url) as client:
        headers = {"authorization": f"Bearer {key}"}
        answer = await client.post("/v1/completions", json=body, headers=headers)
        assert answer.json()["choices"][0]["text"] == text_of(5)
    return [fake.generated[-1].body for fake in (s.prefill, s.decode)]


@pytest.mark.parametrize("flow", ["pull", "push"])
def test_each_key_has_its_own_cache_salt(flow: str) -> None:
    async def main() -> None:
        keys = frozenset({"one", "two"})
        async with fake_deployment(api_keys=keys, cache_salt_per_key=True, flow=flow) as s:
            salts = []
            for key, own in (("one", None), ("one", None), ("two", None), ("one", "own")):
                body = BODY if own is None else BODY | {"cache_salt": own}
                to_prefill, to_decode = await sent_to_instances(s, body, key)
                assert to_prefill["cache_salt"] == to_decode["cache_salt"]
                salts.append(to_prefill["cache_salt"])
            assert salts[0] == salts[1]
            assert len(set(salts)) == 3
            assert not any("one" in str(salt) for salt in salts)

    uvloop.run(main())


@pytest.mark.parametrize(("asked", "sent"), [(-(10**9), 0), (0, 0), (7, 7), (None, None)])
def test_priorities_are_clamped(asked: int | None, sent: int | None) -> None:
    async def main() -> None:
        async with fake_deployment() as s:
            body = BODY if asked is None else BODY | {"priority": asked}
            for got in await sent_to_instances(s, body, "any"):
                assert got.get("priority") == sent

    uvloop.run(main())


def test_priority_of_plain_request_is_clamped() -> None:
    async def main() -> None:
        async with fake_deployment(num_prefills=0, num_decodes=0, num_both=1) as s:
            async with httpx.AsyncClient(base_url=s.url) as client:
                await client.post("/v1/completions", json=BODY | {"priority": -5})
            assert s.decode.generated[-1].body["priority"] == 0

    uvloop.run(main())
