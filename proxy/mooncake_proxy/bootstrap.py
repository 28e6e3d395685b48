"""vLLM's own Mooncake connector in the pull flow: who P is, as its bootstrap server says.

This connector's P answers without `kv_transfer_params`. Whoever routes names the transfer, to P and
D alike, and tells D where P's bootstrap server is and what P's engine is called; that name is new
with every start of P (vllm/distributed/kv_transfer/kv_connector/v1/mooncake).
"""

from __future__ import annotations

import msgspec
from msgspec import Raw, Struct

from mooncake_proxy.errors import MalformedAnswer
from mooncake_proxy.http1.connection import ClientContext
from mooncake_proxy.http1.origin import Origin
from mooncake_proxy.http1.pool import Pool
from mooncake_proxy.openai import encode

LOOK_TIMEOUT_S = 5.0


class Rank(Struct):
    """A data-parallel rank of P, as far as D has to know it."""

    engine_id: str


_ranks_decoder = msgspec.json.Decoder(dict[str, Rank])


class Bootstrap:
    """The bootstrap server of one P. Its failures count as failures of `instance`."""

    def __init__(self, instance: Origin, port: int, context: ClientContext) -> None:
        self._origin = Origin("http", instance.host, port)
        self._pool = Pool(self._origin, context, name=str(instance))
        self._engine_id: str | None = None

    async def engine_id(self) -> str:
        """What P's engine is called; asked once."""
        if self._engine_id is None:
            head = f"GET /query HTTP/1.1\r\nhost: {self._origin.authority}\r\n\r\n".encode("ascii")
            deadline = self._pool.context.loop.time() + LOOK_TIMEOUT_S
            self._engine_id = self._only_one(await self._pool.fetch(head, deadline))
        return self._engine_id

    def _only_one(self, body: bytes) -> str:
        try:
            [rank] = _ranks_decoder.decode(body).values()
        except (msgspec.DecodeError, ValueError) as exc:
            detail = f"bootstrap server {self._origin}: wanted one data-parallel rank: {exc}"
            raise MalformedAnswer(self._pool.name, detail) from exc
        return rank.engine_id

    def forget(self) -> None:
        """P may have started anew."""
        self._engine_id = None

    def close(self) -> None:
        """Close the connections to it."""
        self._pool.close()

    def for_decode(self, engine_id: str, transfer_id: str) -> Raw:
        """D's parameters: where the KV of this transfer is."""
        params = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "transfer_id": transfer_id,
            "remote_engine_id": engine_id,
            "remote_bootstrap_addr": str(self._origin),
        }
        return Raw(encode(params))


def for_prefill(transfer_id: str) -> Raw:
    """P's parameters: what the transfer will be called."""
    params = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer_id}
    return Raw(encode(params))
