"""The client's side of the proxy's tests: sends requests and reassembles streams."""

from __future__ import annotations

import asyncio
import json
import ssl
import subprocess
from pathlib import Path
from typing import Any

import httpx
from support.proxy_fakes import FakeDeployment

Json = dict[str, Any]
# Without the default CA certificates, whose loading takes longer than most tests here.
NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
BODY: Json = {"model": "m", "prompt": "once upon a time", "max_tokens": 5}
STREAM: Json = BODY | {"stream": True}
CHAT: Json = {
    "model": "m",
    "messages": [{"role": "user", "content": "hi"}],
    "max_tokens": 5,
}


def events_of(text: str) -> list[Any]:
    """The data of each event; [DONE] stays a string."""
    found = [block[6:] for block in text.split("\n\n") if block]
    return [data if data == "[DONE]" else json.loads(data) for data in found]


def streamed_text(events: list[Any]) -> str:
    """The text that a client assembles from the events of choice 0."""
    pieces = []
    for event in events:
        for choice in event.get("choices", []) if isinstance(event, dict) else []:
            if choice["index"] == 0:
                delta = choice.get("delta", {})
                pieces.append(choice.get("text") or delta.get("content") or "")
    return "".join(pieces)


async def post(s: FakeDeployment, body: Json, path: str = "/v1/completions") -> httpx.Response:
    async with httpx.AsyncClient(base_url=s.url, verify=NO_TLS) as client:
        return await client.post(path, json=body, headers={"x-request-id": "abc"})


async def send_raw(
    s: FakeDeployment, body: Json
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Send a completion request on a connection of its own, which the test may cut any time."""
    reader, writer = await asyncio.open_connection("127.0.0.1", s.app.port)
    data = json.dumps(body).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nhost: x\r\nx-request-id: abc\r\n"
        f"content-length: {len(data)}\r\n\r\n"
    )
    writer.write(head.encode() + data)
    return reader, writer


def make_certificate(certificate: Path, key: Path) -> None:
    """Create a self-signed certificate for loopback."""
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    command += ["-nodes", "-days", "2", "-subj", "/CN=localhost"]
    command += [
        "-addext",
        "subjectAltName=IP:::1,IP:127.0.0.1",
        "-keyout",
        str(key),
        "-out",
        str(certificate),
    ]
    subprocess.run(command, check=True, capture_output=True)
