"""MooncakeConnector: the decode side pulls (after vLLM-Ascend's MooncakeConnectorV1).

The prefill instance keeps a finished prompt's blocks under a lease. The decode instance renews the
lease while the request queues, reads the blocks one-sidedly into its own, and asks whether the
lease was held all along; only then is the KV used. Calls return at once; I/O is on one thread.
"""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

from mooncake_engine.kv_transfer.base import ConnectorSetup
from mooncake_engine.kv_transfer.connector_core import ConnectorCore
from mooncake_engine.kv_transfer.context import SideContext
from mooncake_engine.kv_transfer.facts import check_fit
from mooncake_engine.kv_transfer.params import TransferMode, build_params, parse_handoff
from mooncake_engine.kv_transfer.protocol import AnyMessage, LeaseStatus
from mooncake_engine.kv_transfer.pull.decode_side import DecodeSide
from mooncake_engine.kv_transfer.pull.prefill_side import PrefillSide
from mooncake_engine.kv_transfer.pull.rank_loads import RankLoads
from mooncake_engine.kv_transfer.pull.rank_messages import LoadReport, from_rank
from mooncake_engine.kv_transfer.rank_messages import RankReady
from mooncake_engine.messages import KVTransferParams
from mooncake_engine.scheduling.request import FirstToken, Request


class MooncakeConnector(ConnectorCore):
    """Core side of the pull connector; both roles, since an instance may have both.

    Args:
        setup: what it is built from.
    """

    mode = TransferMode.PULL
    worker = "mooncake_engine.kv_transfer.pull.worker:PullWorker"

    def __init__(self, setup: ConnectorSetup) -> None:
        self._loads = RankLoads(setup.config.num_ranks, setup.send)
        super().__init__(
            setup, self._loads, lambda own, holder: check_fit(prefill=holder, decode=own)
        )

    # --- life cycle --------------------------------------------------------------------------

    def on_rank_message(self, rank: int, message: bytes) -> None:
        """See ``Connector``."""
        decoded = from_rank.decode(message)
        if isinstance(decoded, LoadReport):
            self._loop.call(self._loads.report, rank, decoded)
        elif isinstance(decoded, RankReady):
            self._rank_is_ready(rank, decoded)

    def _open_sides(self, context: SideContext) -> list[Coroutine[Any, Any, None]]:
        self._prefill = PrefillSide(context)
        self._decode = DecodeSide(context, self._loads, self._peers)
        return [self._prefill.sweep(), self._decode.keep_leases()]

    def _handle(self, message: AnyMessage) -> AnyMessage:
        return self._prefill.handle(message)

    async def _drain(self) -> bool:
        """Reads are ours, and end with the ranks; what peers read of ours they don't use."""
        return True

    def stats(self) -> dict[str, float]:
        """See ``Connector``."""
        counts = self._decode.counts
        return {
            "leases_held": float(self._prefill.num_held),
            "leases_expired": float(self._prefill.num_expired),
            "loads": float(counts.loads),
            "load_failures": float(counts.failures),
            "refused_loads": float(counts.refusals),
            "refused_peers": float(self._refusals.num_peers),
            "bytes_received": float(counts.nbytes),
            "load_seconds": counts.seconds,
        }

    # --- what the scheduler asks -------------------------------------------------------------

    def announce(self, request: Request) -> None:
        """See ``KVConnector``: who pulls sends nothing ahead."""

    def offer(self, request: Request, block_ids: list[int]) -> KVTransferParams:
        """See ``KVConnector``."""
        self._loop.call(self._prefill.grant, request.request_id)
        first = FirstToken(request.token_ids[-1], request.last_logprobs, request.num_cached_tokens)
        return build_params(
            self._holder, request.request_id, block_ids, request.spec.prompt_token_ids, first
        )

    def withdraw(self, request_id: str) -> None:
        """See ``KVConnector``."""
        self._loop.call(self._end_lease, request_id)

    def _end_lease(self, request_id: str) -> None:
        self._prefill.end(request_id, LeaseStatus.EXPIRED)

    def expect(self, request: Request) -> None:
        """See ``KVConnector``."""
        handoff = parse_handoff(request.spec.kv_transfer_params, request.num_prompt_tokens)
        assert handoff.remote is not None, "the front end admitted a request without a remote"
        self._loop.call(self._decode.expect, request.request_id, handoff.remote)

    def load(self, request: Request, first_token: int) -> None:
        """See ``KVConnector``."""
        blocks = tuple(request.block_ids)
        self._loop.call(self._decode.load, request.request_id, blocks, first_token)

    def cancel(self, request_id: str) -> None:
        """See ``KVConnector``."""
        self._loop.call(self._decode.cancel, request_id)
