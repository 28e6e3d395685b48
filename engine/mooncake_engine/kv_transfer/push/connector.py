"""MooncakeLayerwiseConnector: the prefill side pushes (after vLLM-Ascend's connector of that name).

The decode instance comes first: it reserves blocks and tells the proxy's metaserver where they are.
The prefill instance that is sent there asks for entry and writes each layer as soon as its KV is
computed, chunk by chunk, while the next one computes. With the first token it says how many bytes
each of its ranks wrote to each decode rank; only if that is exact, the request runs.
"""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

from mooncake_engine.kv_transfer.base import ConnectorSetup
from mooncake_engine.kv_transfer.connector_core import ConnectorCore
from mooncake_engine.kv_transfer.context import SideContext
from mooncake_engine.kv_transfer.facts import check_fit
from mooncake_engine.kv_transfer.params import TransferMode, build_push_params, parse_handoff
from mooncake_engine.kv_transfer.protocol import AnyMessage, Inquire, PushedToken
from mooncake_engine.kv_transfer.push.decode_side import PushDecodeSide
from mooncake_engine.kv_transfer.push.prefill_side import PushPrefillSide, RankGroup
from mooncake_engine.kv_transfer.push.presence import inquire
from mooncake_engine.kv_transfer.push.rank_messages import (
    EndPush,
    MeetRanks,
    PushReport,
    from_rank,
)
from mooncake_engine.kv_transfer.rank_messages import RankReady
from mooncake_engine.messages import KVTransferParams, TokenLogprobs
from mooncake_engine.scheduling.request import Request


class MooncakeLayerwiseConnector(ConnectorCore):
    """Core side of the push connector; both roles, since an instance may have both.

    Args:
        setup: what it is built from.
    """

    mode = TransferMode.PUSH
    worker = "mooncake_engine.kv_transfer.push.worker:PushWorker"

    def __init__(self, setup: ConnectorSetup) -> None:
        self._group = RankGroup(setup.config.num_ranks, setup.send)
        self._metaservers: dict[str, str] = {}  # by expected request; the core's thread only
        super().__init__(
            setup, self._group, lambda own, reader: check_fit(prefill=own, decode=reader)
        )

    # --- life cycle --------------------------------------------------------------------------

    def on_rank_message(self, rank: int, message: bytes) -> None:
        """See ``Connector``."""
        decoded = from_rank.decode(message)
        if isinstance(decoded, PushReport):
            self._loop.call(self._prefill.report, rank, decoded)
        elif isinstance(decoded, RankReady):
            self._rank_is_ready(rank, decoded)

    def _open_sides(self, context: SideContext) -> list[Coroutine[Any, Any, None]]:
        self._group.tell_all(MeetRanks(context.facts.ranks))
        address = (self._holder.host, self._holder.port)
        self._prefill = PushPrefillSide(context, self._group, self._peers, address)
        self._decode = PushDecodeSide(
            context,
            lambda writer, names, is_near: inquire(writer, names, self._peers, is_near=is_near),
        )
        return [self._prefill.keep_in_touch(), self._decode.sweep()]

    def _handle(self, message: AnyMessage) -> AnyMessage:
        if isinstance(message, Inquire):
            return self._prefill.standing(message)
        return self._decode.handle(message)

    async def _drain(self) -> bool:
        return await self._prefill.drain(self._config.transfer_timeout_s)

    def stats(self) -> dict[str, float]:
        """See ``Connector``."""
        sent, received = self._prefill.counts, self._decode.counts
        return {
            "leases_held": float(self._prefill.num_sending),
            "reservations": float(self._decode.num_reserved),
            "pushes": float(sent.pushes),
            "push_failures": float(sent.failures),
            "bytes_sent": float(sent.nbytes),
            "push_seconds": sent.seconds,
            "loads": float(received.loads),
            "load_failures": float(received.failures),
            "refused_loads": float(received.refusals),
            "refused_peers": float(self._refusals.num_peers),
            "bytes_received": float(received.nbytes),
            "load_seconds": received.seconds,
        }

    # --- what the scheduler asks of a prefill instance ---------------------------------------

    def announce(self, request: Request) -> None:
        """See ``KVConnector``."""
        handoff = parse_handoff(request.spec.kv_transfer_params, request.num_prompt_tokens)
        assert handoff.target is not None, "the front end admitted a push without a target"
        self._loop.call(self._prefill.begin, request.request_id, handoff.target)

    def offer(self, request: Request, block_ids: list[int]) -> KVTransferParams | None:
        """See ``KVConnector``: the KV is sent, so the answer carries nothing."""
        end = EndPush(
            request.request_id,
            is_complete=True,
            block_ids=tuple(block_ids),
            num_tokens=request.num_prompt_tokens,
        )
        token = PushedToken(
            request.token_ids[-1], _logprobs(request.last_logprobs), request.num_cached_tokens
        )
        self._loop.call(self._prefill.complete, end, token)
        return None

    def withdraw(self, request_id: str) -> None:
        """See ``KVConnector``."""
        self._loop.call(self._prefill.withdraw, request_id)

    # --- what the scheduler asks of a decode instance ----------------------------------------

    def expect(self, request: Request) -> None:
        """See ``KVConnector``."""
        handoff = parse_handoff(request.spec.kv_transfer_params, request.num_prompt_tokens)
        assert handoff.metaserver is not None, "the front end admitted a request without one"
        self._metaservers[request.request_id] = handoff.metaserver

    def load(self, request: Request, first_token: int) -> None:
        """See ``KVConnector``."""
        name = request.request_id
        prompt = request.spec.prompt_token_ids
        params = build_push_params(self._holder, name, request.block_ids, prompt, first_token)
        self._loop.call(self._decode.load, name, self._metaservers.pop(name), params)

    def cancel(self, request_id: str) -> None:
        """See ``KVConnector``."""
        self._metaservers.pop(request_id, None)
        self._loop.call(self._decode.cancel, request_id)


def _logprobs(logprobs: TokenLogprobs | None) -> tuple[float, tuple[tuple[int, float], ...]] | None:
    return None if logprobs is None else (logprobs.logprob, logprobs.top)
