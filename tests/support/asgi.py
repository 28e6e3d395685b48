"""Calls an ASGI application without a network."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

Json = dict[str, Any]


@dataclass
class AsgiClient:
    """Requests to one application, each complete before the next."""

    app: Callable[..., Awaitable[None]]
    headers: Mapping[str, str] = field(default_factory=dict)

    def request(self, method: str, path: str, **options: Any) -> httpx.Response:
        async def run() -> httpx.Response:
            transport = httpx.ASGITransport(self.app)
            async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
                return await client.request(method, path, headers=dict(self.headers), **options)

        return asyncio.run(run())

    def get(self, path: str) -> httpx.Response:
        return self.request("GET", path)

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.request("POST", path, json=body)

    def stream(self, path: str, **body: Any) -> list[Json]:
        """The events of a successful stream, without ``[DONE]``."""
        response = self.post(path, stream=True, **body)
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        return events(response.text)


def events(body: str) -> list[Json]:
    """The payloads of server-sent events that end with ``[DONE]``."""
    *payloads, last = [event.removeprefix("data: ") for event in body.strip().split("\n\n")]
    assert last == "[DONE]"
    return [json.loads(payload) for payload in payloads]


@dataclass
class ManualClient:
    """One POST request whose client disconnects when the test says so."""

    body: bytes
    path: str = "/v1/completions"
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    sent: list[Json] = field(default_factory=list)

    @property
    def scope(self) -> Json:
        return {
            "type": "http",
            "method": "POST",
            "path": self.path,
            "raw_path": self.path.encode(),
            "query_string": b"",
            "headers": self.headers,
            "http_version": "1.1",
            "scheme": "http",
        }

    async def receive(self) -> Json:
        if self.body:
            body, self.body = self.body, b""
            return {"type": "http.request", "body": body, "more_body": False}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Json) -> None:
        self.sent.append(message)
