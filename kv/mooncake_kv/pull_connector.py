"""MooncakeConnector: the decode side pulls (after vLLM-Ascend's MooncakeConnectorV1).

The prefill instance keeps a finished prompt's blocks under a lease. The decode instance renews the
lease while the request is queued, reads the blocks into its own with one-sided reads, and then asks
whether the lease was held the whole time; only then is the KV used. Calls return immediately; I/O
runs on one thread.

If the proxy asks the decode instance first, the pull is early: the decode instance reserves blocks
and posts the reservation to the metaserver, as for a push, and reads each chunk of the prompt while
the prefill instance computes the next one.
"""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from functools import partial
from typing import Any

from mooncake_kv.config import KVTransferConfig
from mooncake_kv.connector_scheduler import ConnectorContext, ConnectorScheduler
from mooncake_kv.early_pull_receiver import EarlyPullReceiver
from mooncake_kv.early_pull_sender import EarlyPullSender, Progress
from mooncake_kv.handshake import check_prefill_peer
from mooncake_kv.kv_reader import KVReader
from mooncake_kv.lease_keeper import LeaseKeeper
from mooncake_kv.metaserver_client import MetaserverRule, RequestMetaserver, post_params
from mooncake_kv.params import (
    FirstToken,
    KVTransferDict,
    KVTransferParams,
    TransferMode,
    build_params,
    build_reservation_params,
)
from mooncake_kv.protocol import AnyMessage, LeaseReply, PrefillProgress
from mooncake_kv.pull_receiver import PullReceiver
from mooncake_kv.pull_sender import PullSender
from mooncake_kv.pull_worker import PullWorker
from mooncake_kv.ranks import LoadReport, PushReport


class MooncakeConnector(ConnectorScheduler):
    """Scheduler side of the pull connector; serves both roles, since an instance may have both."""

    mode = TransferMode.PULL
    worker = PullWorker
    pulls_early = True

    def __init__(self, config: KVTransferConfig, num_ranks: int) -> None:
        super().__init__(config, num_ranks, check_prefill_peer)
        self._rule = MetaserverRule(config.metaserver_allow)
        # Early pulls by request; the scheduler's thread only. Decode side: where to post the
        # reservation. Prefill side: requests whose reader has reserved blocks.
        self._metaservers: dict[str, RequestMetaserver] = {}
        self._readers: set[str] = set()

    def _open_flows(self, context: ConnectorContext) -> list[Coroutine[Any, Any, None]]:
        self._loads = self._make_rank_loads(context)
        leases = LeaseKeeper(context, self._peers)
        self._reader = KVReader(context, self._loads, self._peers, leases)
        self._sender = PullSender(context)
        self._receiver = PullReceiver(context, self._reader)
        address = (self._address.host, self._address.port)
        self._early_sender = EarlyPullSender(context, self._peers, self._sender, address)
        self._early_receiver = EarlyPullReceiver(
            context,
            self._reader,
            partial(post_params, rule=self._rule),
            max_load_s=self._config.early_pull_timeout_s,
        )
        return [self._sender.sweep(), leases.keep_leases()]

    def _handle(self, message: AnyMessage) -> AnyMessage:
        if isinstance(message, PrefillProgress):
            return LeaseReply(message.ticket, self._early_receiver.handle(message))
        return self._sender.handle(message)

    def _on_rank_report(self, rank: int, report: LoadReport | PushReport) -> None:
        assert isinstance(report, LoadReport), "the workers of this connector load"
        self._loads.report(rank, report)

    def _fail_request(self, request_id: str, reason: str) -> None:
        if request_id in self._early_receiver:
            self._early_receiver.abort(request_id, reason)
        else:
            self._receiver.abort(request_id, reason)
        self._end_lease(request_id, reason)

    async def _drain(self) -> bool:
        """Nothing to drain: our reads end with the ranks, and peers discard what they read from
        blocks whose lease they can't confirm."""
        return True

    def stats(self) -> dict[str, float]:
        counts = self._reader.counts
        return {
            "leases_held": float(self._sender.num_held),
            "leases_expired": float(self._sender.num_expired),
            "loads": float(counts.transfers),
            "load_failures": float(counts.failures),
            "refused_loads": float(counts.refused),
            "refused_peers": float(self._incompatible.num_peers),
            "reservations": float(len(self._early_receiver)),
            "peers_with_different_rounding": float(self._rounding.num_peers),
            "bytes_received": float(counts.nbytes),
            "bytes_received_early": float(self._early_receiver.num_early_bytes),
            "load_seconds": counts.seconds,
        }

    def on_new_request(self, request_id: str, params: KVTransferParams) -> None:
        if self._refuses(request_id, params):
            return
        if params.remote is not None:
            self._loop.call(request_id, self._receiver.expect, request_id, params.remote)
        elif params.target is not None:
            self._readers.add(request_id)
            self._loop.call(request_id, self._early_sender.begin, request_id, params.target)
        elif params.metaserver is not None:
            self._metaservers[request_id] = RequestMetaserver(
                params.metaserver, params.requester, params.tokenizer
            )

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
        metaserver = self._metaservers.pop(request_id, None)
        if metaserver is None:
            start = num_computed_tokens
            self._loop.call(request_id, self._receiver.load, request_id, blocks, start)
            return
        params = build_reservation_params(
            self._address,
            request_id,
            blocks,
            prompt_token_ids,
            num_computed_tokens,
            cache_salt=cache_salt,
            tokenizer=metaserver.tokenizer,
        )
        params["do_pull"] = True
        self._loop.call(
            request_id, self._early_receiver.load, request_id, blocks, metaserver, params
        )

    def prefill_advanced(
        self, request_id: str, block_ids: Sequence[int], num_computed_tokens: int, attempt: int
    ) -> None:
        progress = Progress(attempt, tuple(block_ids), num_computed_tokens)
        self._loop.call(request_id, self._early_sender.advance, request_id, progress)

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
        if request_id in self._readers:
            self._readers.remove(request_id)
            progress = Progress(attempt, tuple(block_ids), len(prompt_token_ids), first_token)
            self._loop.call(request_id, self._early_sender.complete, request_id, progress)
            return None
        self._loop.call(request_id, self._sender.grant, request_id)
        return build_params(
            self._address, request_id, block_ids, prompt_token_ids, first_token, cache_salt
        )

    def cancel_load(self, request_id: str) -> None:
        self._metaservers.pop(request_id, None)
        self._loop.call(request_id, self._cancel_load, request_id)

    def _cancel_load(self, request_id: str) -> None:
        self._early_receiver.cancel(request_id)
        self._receiver.cancel(request_id)

    def cancel_send(self, request_id: str) -> None:
        self._readers.discard(request_id)
        self._loop.call(request_id, self._end_lease, request_id, "the request was aborted")

    def _end_lease(self, request_id: str, reason: str) -> None:
        self._early_sender.cancel(request_id, reason)
        self._sender.drop(request_id)
