"""What a client of the proxy does in tests: ask, and put a stream together."""

from __future__ import annotations

import json
from typing import Any

import httpx
from support.proxy_fakes import Stand

BODY: dict[str, Any] = {"model": "m", "prompt": "once upon a time", "max_tokens": 5}
CHAT: dict[str, Any] = {
    "model": "m",
    "messages": [{"role": "user", "content": "hi"}],
    "max_tokens": 5,
}


def events_of(text: str) -> list[Any]:
    """The data of each event; [DONE] stays a string."""
    found = [block[6:] for block in text.split("\n\n") if block]
    return [data if data == "[DONE]" else json.loads(data) for data in found]


def streamed_text(events: list[Any]) -> str:
    """What a client puts together from the events of choice 0."""
    pieces = []
    for event in events:
        for choice in event.get("choices", []) if isinstance(event, dict) else []:
            if choice["index"] == 0:
                delta = choice.get("delta", {})
                pieces.append(choice.get("text") or delta.get("content") or "")
    return "".join(pieces)


async def post(s: Stand, body: dict[str, Any], path: str = "/v1/completions") -> httpx.Response:
    async with httpx.AsyncClient(base_url=s.url) as client:
        return await client.post(path, json=body, headers={"x-request-id": "abc"})
