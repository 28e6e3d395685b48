"""Support for vLLM's Mooncake connector in the pull flow: queries P's engine id.

With this connector P answers without `kv_transfer_params`. Instead, the proxy sends a transfer id
to both P and D, and tells D the address of P's bootstrap server and P's engine id, which changes
with every start of P (vllm/distributed/kv_transfer/kv_connector/v1/mooncake).
"""

from __future__ import annotations

import msgspec
from msgspec import Raw, Struct

from mooncake_proxy.api.openai_bodies import encode
from mooncake_proxy.errors import DECODE_ERRORS, MalformedResponse
from mooncake_proxy.http1.connection_pool import ConnectionPool
from mooncake_proxy.http1.http_wire import Origin
from mooncake_proxy.http1.upstream_connection import ClientContext

QUERY_TIMEOUT_S = 5.0


class BootstrapRank(Struct):
    """A data-parallel rank of P."""

    engine_id: str


_ranks_decoder = msgspec.json.Decoder(dict[str, BootstrapRank])


class BootstrapServer:
    """The bootstrap server of one P. Its failures are reported as failures of `instance`."""

    def __init__(self, instance: Origin, port: int, context: ClientContext) -> None:
        self._origin = Origin("http", instance.host, port)
        self._connections = ConnectionPool(self._origin, context, name=str(instance))
        self._engine_id: str | None = None

    async def engine_id(self) -> str:
        """P's engine id; queried once and cached."""
        if self._engine_id is None:
            head = f"GET /query HTTP/1.1\r\nhost: {self._origin.authority}\r\n\r\n".encode("ascii")
            deadline = self._connections.context.loop.time() + QUERY_TIMEOUT_S
            self._engine_id = self._only_one(await self._connections.fetch(head, deadline))
        return self._engine_id

    def _only_one(self, body: bytes) -> str:
        try:
            [rank] = _ranks_decoder.decode(body).values()
        except DECODE_ERRORS as exc:
            detail = f"bootstrap server {self._origin}: wanted one data-parallel rank: {exc}"
            raise MalformedResponse(self._connections.name, detail) from exc
        return rank.engine_id

    def forget(self) -> None:
        """Drop the cached engine id: P may have restarted."""
        self._engine_id = None

    def close(self) -> None:
        """Close the connections to it."""
        self._connections.close()

    def for_decode(self, engine_id: str, transfer_id: str) -> Raw:
        """`kv_transfer_params` for D: where the KV of this transfer is."""
        params = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "transfer_id": transfer_id,
            "remote_engine_id": engine_id,
            "remote_bootstrap_addr": str(self._origin),
        }
        return Raw(encode(params))


def for_prefill(transfer_id: str) -> Raw:
    """`kv_transfer_params` for P: the transfer's id."""
    params = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer_id}
    return Raw(encode(params))
