"""MooncakeLayerwiseConnector: the prefill side pushes (after vLLM-Ascend's connector of that name).

The decode instance is asked first: it reserves blocks and posts their addresses to the proxy's
metaserver. The prefill instance that the proxy chooses opens the push and writes each layer as soon
as its KV is computed, chunk by chunk, while the next layer is computed. With the first token it
reports how many bytes each of its ranks wrote to each decode rank; the decode instance runs the
request only if these counts are exact.
"""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from functools import partial
from typing import Any

from mooncake_kv.config import KVTransferConfig
from mooncake_kv.connector_scheduler import ConnectorContext, ConnectorScheduler
from mooncake_kv.handshake import check_decode_peer
from mooncake_kv.liveness import StatusInquiry
from mooncake_kv.metaserver_client import MetaserverRule, RequestMetaserver, post_params
from mooncake_kv.params import (
    FirstToken,
    KVTransferDict,
    KVTransferParams,
    TransferMode,
    build_reservation_params,
)
from mooncake_kv.protocol import AnyMessage, StatusRequest
from mooncake_kv.push_receiver import PushReceiver
from mooncake_kv.push_sender import PushSender
from mooncake_kv.push_worker import PushWorker
from mooncake_kv.ranks import EndPush, LoadReport, LocalRanks, PushReport


class MooncakeLayerwiseConnector(ConnectorScheduler):
    """Scheduler side of the push connector; serves both roles, since an instance may have both."""

    mode = TransferMode.PUSH
    worker = PushWorker

    def __init__(self, config: KVTransferConfig, num_ranks: int) -> None:
        super().__init__(config, num_ranks, check_decode_peer)
        self._rule = MetaserverRule(config.metaserver_allow)
        # By request that waits for its KV; the scheduler's thread only.
        self._metaservers: dict[str, RequestMetaserver] = {}

    def _open_flows(self, context: ConnectorContext) -> list[Coroutine[Any, Any, None]]:
        self._ranks.broadcast(LocalRanks(context.instance.ranks))
        address = (self._address.host, self._address.port)
        self._conversions = self._make_rank_loads(context)
        self._inquiry = StatusInquiry(self._peers)
        self._sender = PushSender(context, self._ranks, self._peers, address)
        self._receiver = PushReceiver(
            context,
            lambda writer, names, is_local: self._inquiry.ask(writer, names, is_local=is_local),
            partial(post_params, rule=self._rule),
            self._conversions.run,
            max_load_s=self._config.push_timeout_s,
        )
        return [self._sender.keep_alive(), self._receiver.sweep()]

    def _handle(self, message: AnyMessage) -> AnyMessage:
        if isinstance(message, StatusRequest):
            return self._sender.status(message)
        return self._receiver.handle(message)

    def _on_rank_report(self, rank: int, report: LoadReport | PushReport) -> None:
        if isinstance(report, LoadReport):  # of ConvertRopeOrder: its workers load no KV
            self._conversions.report(rank, report)
        else:
            self._sender.report(rank, report)

    def _fail_request(self, request_id: str, reason: str) -> None:
        self._receiver.abort(request_id, reason)
        self._sender.abort(request_id, reason)

    async def _drain(self) -> bool:
        self._inquiry.close()
        return await self._sender.drain(self._config.transfer_timeout_s)

    def stats(self) -> dict[str, float]:
        sent, received = self._sender.counts, self._receiver.counts
        return {
            "leases_held": float(self._sender.num_sending),
            "reservations": float(self._receiver.num_reserved),
            "pushes": float(sent.transfers),
            "push_failures": float(sent.failures),
            "bytes_sent": float(sent.nbytes),
            "push_seconds": sent.seconds,
            "loads": float(received.transfers),
            "load_failures": float(received.failures),
            "refused_loads": float(received.refused),
            "refused_peers": float(self._incompatible.num_peers),
            "peers_with_different_rounding": float(self._rounding.num_peers),
            "bytes_received": float(received.nbytes),
            "load_seconds": received.seconds,
        }

    def on_new_request(self, request_id: str, params: KVTransferParams) -> None:
        if self._refuses(request_id, params):
            return
        if params.target is not None:
            self._loop.call(request_id, self._sender.begin, request_id, params.target)
        elif params.metaserver is not None:
            self._metaservers[request_id] = RequestMetaserver(
                params.metaserver, params.requester, params.tokenizer
            )

    def prefill_advanced(
        self, request_id: str, block_ids: Sequence[int], num_computed_tokens: int, attempt: int
    ) -> None:
        pass  # the ranks track it themselves, layer by layer

    def request_finished(
        self,
        request_id: str,
        block_ids: Sequence[int],
        prompt_token_ids: Sequence[int],
        first_token: FirstToken,
        *,
        cache_salt: str = "",
        attempt: int = 0,
    ) -> KVTransferDict | None:
        end = EndPush(
            request_id,
            is_complete=True,
            block_ids=tuple(block_ids),
            num_tokens=len(prompt_token_ids),
        )
        self._loop.call(request_id, self._sender.complete, end, first_token)
        return None

    def cancel_send(self, request_id: str) -> None:
        self._loop.call(request_id, self._sender.cancel, request_id)

    def start_load_kv(
        self,
        request_id: str,
        block_ids: Sequence[int],
        prompt_token_ids: Sequence[int],
        num_computed_tokens: int,
        *,
        cache_salt: str = "",
    ) -> None:
        metaserver = self._metaservers.pop(request_id)
        params = build_reservation_params(
            self._address,
            request_id,
            block_ids,
            prompt_token_ids,
            num_computed_tokens,
            cache_salt=cache_salt,
            tokenizer=metaserver.tokenizer,
        )
        blocks = tuple(block_ids)
        self._loop.call(request_id, self._receiver.load, request_id, blocks, metaserver, params)

    def cancel_load(self, request_id: str) -> None:
        self._metaservers.pop(request_id, None)
        self._loop.call(request_id, self._receiver.cancel, request_id)
