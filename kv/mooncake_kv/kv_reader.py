"""What every pull does: read a part of a prompt on all ranks, and have its lease confirmed after
the last one. Loop thread only."""

from __future__ import annotations

import logging

from mooncake_kv.connector_scheduler import ConnectorContext, TransferCounts
from mooncake_kv.errors import LeaseLost
from mooncake_kv.lease_keeper import LeaseKeeper
from mooncake_kv.params import RemoteKV
from mooncake_kv.peers import PeerInstance, PeerTable
from mooncake_kv.protocol import LeaseStatus
from mooncake_kv.ranks import Load, RankLoads

logger = logging.getLogger(__name__)


class KVReader:
    """Reads prompts' KV, and counts.

    Args:
        context: what it works with.
        loads: on the ranks of this instance.
        peers: who hold KV.
        leases: at these.
    """

    def __init__(
        self, context: ConnectorContext, loads: RankLoads, peers: PeerTable, leases: LeaseKeeper
    ) -> None:
        self.loads = loads
        self.peers = peers
        self.leases = leases
        self.counts = TransferCounts()
        self._context = context

    def name_of(self, request_id: str) -> str:
        """How this instance introduces itself as the reader of a request's KV."""
        return f"{self._context.instance.engine_id}/{request_id}"

    async def read(self, order: Load) -> int:
        """Have all ranks read; returns how many bytes. They are drained then, or when it raises.

        Raises:
            KVTransferError: at least one of them failed.
        """
        started = self._context.clock()
        reports = await self.loads.run(order)
        nbytes = sum(report.nbytes for report in reports)
        self.counts.nbytes += nbytes
        self._context.received.add(order.engine_id, nbytes)
        self.counts.seconds += self._context.clock() - started
        return nbytes

    async def confirm(self, peer: PeerInstance, remote: RemoteKV, request_id: str) -> None:
        """Say that all is read; only then it may be used.

        The holder can't stop a one-sided read, under which its lease may have run out, so that its
        blocks are another request's by now. Only a lease that was held until after the last byte
        proves that what was read is this prompt's KV. The reader's name makes a repeated Done
        idempotent, and a second reader's void.

        Raises:
            LeaseLost: it was not held all along.
            KVTransferError: the holder does not answer.
        """
        status = await peer.done(remote.request_id, self.name_of(request_id))
        if status is not LeaseStatus.RELEASED:
            raise LeaseLost(
                f"the prefill instance's lease was {status.value} when the read ended; "
                "what was read is not used"
            )

    def note_failure(self, request_id: str, engine_id: str, error: str) -> None:
        """A request's KV did not come from that instance."""
        incompatible = self._context.incompatible
        self.counts.failures += 1
        self.counts.refused += engine_id in incompatible
        logger.log(
            incompatible.level(engine_id), "loading the KV of %s failed: %s", request_id, error
        )
