"""MooncakeConnector: the decode side pulls (after vLLM-Ascend's MooncakeConnectorV1).

The prefill instance keeps a finished prompt's blocks under a lease. The decode instance renews the
lease while the request queues, reads the blocks one-sidedly into its own, and asks whether the
lease was held all along; only then is the KV used. Calls return at once; I/O is on one thread.
"""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from typing import Any

from mooncake_kv.config import KVTransferConfig
from mooncake_kv.connector_scheduler import ConnectorContext, ConnectorScheduler
from mooncake_kv.handshake import check_prefill_peer
from mooncake_kv.params import (
    FirstToken,
    KVTransferDict,
    KVTransferParams,
    TransferMode,
    build_params,
    prompt_digest,
)
from mooncake_kv.protocol import AnyMessage, LeaseStatus
from mooncake_kv.pull_receiver import PullReceiver
from mooncake_kv.pull_sender import PullSender
from mooncake_kv.pull_worker import PullWorker
from mooncake_kv.ranks import LoadReport, PushReport, RankLoads


class MooncakeConnector(ConnectorScheduler):
    """Scheduler side of the pull connector; for both roles, since an instance may have both."""

    mode = TransferMode.PULL
    worker = PullWorker

    def __init__(self, config: KVTransferConfig, num_ranks: int) -> None:
        super().__init__(config, num_ranks, check_prefill_peer)

    def _open_flows(self, context: ConnectorContext) -> list[Coroutine[Any, Any, None]]:
        self._loads = RankLoads(self._ranks)
        self._sender = PullSender(context)
        self._receiver = PullReceiver(context, self._loads, self._peers)
        return [self._sender.sweep(), self._receiver.keep_leases()]

    def _handle(self, message: AnyMessage) -> AnyMessage:
        return self._sender.handle(message)

    def _take_report(self, rank: int, report: LoadReport | PushReport) -> None:
        assert isinstance(report, LoadReport), "the workers of this connector load"
        self._loads.report(rank, report)

    def _give_up(self, request_id: str, reason: str) -> None:
        self._receiver.give_up(request_id, reason)
        self._sender.give_up(request_id)

    async def _drain(self) -> bool:
        """Reads are ours, and end with the ranks; what peers read of ours they don't use."""
        return True

    def stats(self) -> dict[str, float]:
        counts = self._receiver.counts
        return {
            "leases_held": float(self._sender.num_held),
            "leases_expired": float(self._sender.num_expired),
            "loads": float(counts.transfers),
            "load_failures": float(counts.failures),
            "refused_loads": float(counts.refused),
            "refused_peers": float(self._incompatible.num_peers),
            "bytes_received": float(counts.nbytes),
            "load_seconds": counts.seconds,
        }

    def on_new_request(self, request_id: str, params: KVTransferParams) -> None:
        if params.remote is not None:
            self._loop.call(request_id, self._receiver.expect, request_id, params.remote)

    def start_load_kv(
        self,
        request_id: str,
        block_ids: Sequence[int],
        prompt_token_ids: Sequence[int],
        num_computed_tokens: int,
        *,
        cache_salt: str = "",
    ) -> None:
        blocks = tuple(block_ids)
        self._loop.call(request_id, self._receiver.load, request_id, blocks, num_computed_tokens)

    def request_finished(
        self,
        request_id: str,
        block_ids: Sequence[int],
        prompt_token_ids: Sequence[int],
        first_token: FirstToken,
        *,
        cache_salt: str = "",
    ) -> KVTransferDict | None:
        self._loop.call(request_id, self._sender.grant, request_id)
        params = build_params(self._address, request_id, block_ids, prompt_token_ids, first_token)
        params["prompt_digest"] = prompt_digest(prompt_token_ids, cache_salt)
        return params

    def cancel_load(self, request_id: str) -> None:
        self._loop.call(request_id, self._receiver.cancel, request_id)

    def cancel_send(self, request_id: str) -> None:
        self._loop.call(request_id, self._end_lease, request_id)

    def _end_lease(self, request_id: str) -> None:
        self._sender.end(request_id, LeaseStatus.EXPIRED)
