"""llm-d's routing sidecar (v0.9, connector ``nixlv2``), as far as instances observe it.

The fields that it writes into bodies and headers, and its handling of answers, follow its sources
(``pkg/sidecar/proxy/connector_nixlv2.go``, ``chat_completions.go`` of llm-d/llm-d-router).
"""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

PREFILLER = "x-prefiller-host-port"
DISAGGREGATED = ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses")
_OF_THE_CONNECTION = {"host", "content-length", "transfer-encoding", "connection"}


class RoutingSidecar:
    """The sidecar in front of one decode instance."""

    def __init__(self, decoder_url: str) -> None:
        self._decoder_url = decoder_url
        self._client = httpx.AsyncClient(timeout=60.0)

    @asynccontextmanager
    async def _running(self, app: Starlette) -> AsyncIterator[None]:
        async with self._client:
            yield

    def app(self) -> Starlette:
        """The application that serves its port."""
        handed_over = [Route(path, self._hand_over, methods=["POST"]) for path in DISAGGREGATED]
        passed_on = Route("/{rest:path}", self._pass_on, methods=["GET", "POST"])
        return Starlette(routes=[*handed_over, passed_on], lifespan=self._running)

    async def _hand_over(self, request: Request) -> Response:
        prefiller = request.headers.get(PREFILLER, "").split(",")[0].strip()
        if not prefiller:
            return await self._pass_on(request)
        body: dict[str, Any] = await request.json()
        headers = [*_kept(request), ("x-request-id", str(uuid.uuid1()))]
        path = request.url.path
        content = json.dumps(prefill_body(body, path))
        answer = await self._client.post(
            f"http://{prefiller}{path}", content=content, headers=headers
        )
        if not answer.is_success:
            return Response(answer.content, answer.status_code, media_type="application/json")
        body["kv_transfer_params"] = answer.json().get("kv_transfer_params")
        return await self._decode(request, json.dumps(body).encode(), headers)

    async def _pass_on(self, request: Request) -> Response:
        return await self._decode(request, await request.body(), _kept(request))

    async def _decode(
        self, request: Request, body: bytes, headers: list[tuple[str, str]]
    ) -> Response:
        url = f"{self._decoder_url}{request.url.path}"
        sent = self._client.build_request(request.method, url, content=body, headers=headers)
        answer = await self._client.send(sent, stream=True)
        kept = {k: v for k, v in answer.headers.items() if k not in _OF_THE_CONNECTION}
        closing = BackgroundTask(answer.aclose)
        return StreamingResponse(answer.aiter_raw(), answer.status_code, kept, background=closing)


def prefill_body(body: dict[str, Any], path: str) -> dict[str, Any]:
    """The request that it sends to the prefill instance."""
    asked = {name: value for name, value in body.items() if name != "stream_options"}
    asked["kv_transfer_params"] = {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
    }
    is_responses = path == "/v1/responses"
    limits = ["max_output_tokens"] if is_responses else ["max_tokens", "max_completion_tokens"]
    return asked | dict.fromkeys(limits, 1) | {"stream": False}


def _kept(request: Request) -> list[tuple[str, str]]:
    dropped = _OF_THE_CONNECTION | {PREFILLER}
    return [pair for pair in request.headers.items() if pair[0] not in dropped]
