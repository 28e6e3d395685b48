"""MooncakeConnector: the decode side pulls (after vLLM-Ascend's MooncakeConnectorV1).

The prefill instance keeps a finished prompt's blocks under a lease. The decode instance renews the
lease while the request queues, reads the blocks one-sidedly into its own, and asks whether the
lease was held all along; only then is the KV used. Calls return at once; I/O is on one thread.
"""

from __future__ import annotations

import logging
import threading

import zmq.asyncio

from mooncake_engine.errors import ConfigError, PortTaken
from mooncake_engine.kv_transfer.base import ConnectorSetup
from mooncake_engine.kv_transfer.context import SideContext
from mooncake_engine.kv_transfer.decode_side import DecodeSide
from mooncake_engine.kv_transfer.events import ConnectorFailed
from mooncake_engine.kv_transfer.facts import InstanceFacts, RankFacts, check_fit, model_fingerprint
from mooncake_engine.kv_transfer.io_loop import IoLoop
from mooncake_engine.kv_transfer.params import Holder, build_params, parse_handoff
from mooncake_engine.kv_transfer.peers import PeerBook
from mooncake_engine.kv_transfer.prefill_side import PrefillSide
from mooncake_engine.kv_transfer.protocol import LeaseStatus
from mooncake_engine.kv_transfer.rank_loads import RankLoads
from mooncake_engine.kv_transfer.rank_messages import LoadReport, RankReady, from_rank
from mooncake_engine.kv_transfer.side_channel import SideChannelServer
from mooncake_engine.messages import KVTransferParams
from mooncake_engine.scheduling.request import FirstToken, Request

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 60.0


class MooncakeConnector:
    """Core side of the pull connector; both roles, since an instance may have both.

    Args:
        setup: what it is built from.
    """

    def __init__(self, setup: ConnectorSetup) -> None:
        config = setup.config.kv_transfer
        if config is None:
            raise ConfigError("MooncakeConnector needs a kv_transfer configuration")
        self._setup = setup
        self._config = config
        self._rank_facts: dict[int, RankFacts] = {}
        self._ranks_ready = threading.Event()
        self._ranks = RankLoads(setup.config.tp_size, setup.send)
        self._loop = IoLoop("kv-connector", lambda exc: setup.sink(ConnectorFailed(exc)))
        self._is_started = False

    # --- life cycle --------------------------------------------------------------------------

    def on_rank_message(self, rank: int, message: bytes) -> None:
        """See ``Connector``."""
        decoded = from_rank.decode(message)
        if isinstance(decoded, LoadReport):
            self._loop.call(self._ranks.report, rank, decoded)
        elif isinstance(decoded, RankReady):
            self._rank_facts[rank] = decoded.facts
            if len(self._rank_facts) == self._setup.config.tp_size:
                self._ranks_ready.set()

    def start(self) -> None:
        """See ``Connector``."""
        try:
            if not self._ranks_ready.wait(START_TIMEOUT_S):
                raise ConfigError(
                    f"{len(self._rank_facts)} of {self._setup.config.tp_size} ranks opened their "
                    f"transports within {START_TIMEOUT_S:g} s"
                )
            self._loop.run(self._open(), START_TIMEOUT_S)
        except BaseException:
            self._loop.close()
            raise
        self._is_started = True

    async def _open(self) -> None:
        config = self._config
        secret = config.secret.encode()
        context = SideContext(self._facts(), config.lease_s, self._setup.sink, self._loop.spawn)
        self._context = zmq.asyncio.Context()
        self._prefill = PrefillSide(context)
        try:
            self._server = SideChannelServer(
                self._context, config.host, config.port, secret, self._prefill.handle
            )
        except PortTaken:
            self._context.destroy(linger=0)
            raise
        self._peers = PeerBook(
            self._context,
            secret,
            self._ranks,
            self._loop.spawn,
            lambda own, holder: check_fit(prefill=holder, decode=own),
        )
        self._decode = DecodeSide(context, self._ranks, self._peers)
        self._holder = Holder(
            self._setup.engine_id,
            config.host,
            self._server.port,
            self._setup.config.tp_size,
            self._setup.config.block_size,
        )
        for task in (self._server.serve(), self._prefill.sweep(), self._decode.keep_leases()):
            self._loop.spawn(task)
        logger.info("KV side channel on %s port %d", config.host, self._server.port)

    def _facts(self) -> InstanceFacts:
        setup = self._setup
        return InstanceFacts(
            setup.engine_id,
            model_fingerprint(setup.config.model),
            setup.tokenizer_fingerprint,
            setup.geometry,
            setup.config.block_size,
            setup.hardware,
            tuple(self._rank_facts[rank] for rank in range(setup.config.tp_size)),
        )

    def close(self) -> None:
        """See ``Connector``."""
        if self._is_started:
            self._is_started = False
            self._loop.run(self._shut(), START_TIMEOUT_S)
        self._loop.close()

    async def _shut(self) -> None:
        self._peers.close()
        self._server.close()
        self._context.destroy(linger=0)

    def stats(self) -> dict[str, float]:
        """See ``Connector``."""
        counts = self._decode.counts
        return {
            "leases_held": float(self._prefill.num_held),
            "leases_expired": float(self._prefill.num_expired),
            "loads": float(counts.loads),
            "load_failures": float(counts.failures),
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
            self._holder, request.request_id, block_ids, request.num_prompt_tokens, first
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
