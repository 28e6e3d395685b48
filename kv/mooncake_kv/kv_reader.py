"""Steps that pull and early pull share: reads a part of a prompt on all ranks, and confirms the
lease after the last read. Loop thread only."""

from __future__ import annotations

import logging

from mooncake_kv.connector_scheduler import ConnectorContext, TransferCounts
from mooncake_kv.errors import HandshakeRefused, LeaseLost
from mooncake_kv.lease_keeper import LeaseKeeper
from mooncake_kv.params import RemoteKV
from mooncake_kv.peers import PeerInstance, PeerTable
from mooncake_kv.protocol import LeaseStatus
from mooncake_kv.ranks import Load, RankLoads

logger = logging.getLogger(__name__)


class KVReader:
    """Reads prompts' KV from prefill instances, and counts transfers.

    Args:
        context: services of the connector.
        loads: sends loads to the ranks of this instance.
        peers: the instances that hold KV.
        leases: renews the leases at these instances.
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
        """The name under which this instance reads a request's KV."""
        return f"{self._context.instance.engine_id}/{request_id}"

    async def read(self, order: Load) -> int:
        """Read on all ranks; returns the number of bytes. All ranks are drained when it returns or
        raises KVTransferError.

        Raises:
            KVTransferError: at least one rank failed.
        """
        started = self._context.clock()
        try:
            reports = await self.loads.run(order)
        except HandshakeRefused as exc:
            self._context.incompatible.note(order.engine_id, str(exc))
            raise
        nbytes = sum(report.nbytes for report in reports)
        self.counts.nbytes += nbytes
        self._context.received.add(order.engine_id, nbytes)
        self.counts.seconds += self._context.clock() - started
        return nbytes

    async def confirm(self, peer: PeerInstance, remote: RemoteKV, request_id: str) -> None:
        """Tell the holder that the prompt is read, and check that its lease was held until now.
        The KV must not be used before.

        The holder can't stop a one-sided read. If its lease expires during the read, its blocks may
        already belong to another request. Only a lease that was held until after the last byte
        proves that what was read is this prompt's KV. The reader's name makes a repeated Done
        idempotent, and voids the Done of a second reader.

        Raises:
            LeaseLost: the lease was not held the whole time.
            KVTransferError: the holder does not answer.
        """
        status = await peer.done(remote.request_id, self.name_of(request_id))
        if status is not LeaseStatus.RELEASED:
            raise LeaseLost(
                f"the prefill instance's lease was {status.value} when the read ended; "
                "what was read is not used"
            )

    def note_failure(self, request_id: str, engine_id: str, error: str) -> None:
        """Count and log that a request's KV could not be loaded from an instance."""
        incompatible = self._context.incompatible
        self.counts.failures += 1
        self.counts.refused += engine_id in incompatible
        logger.log(
            incompatible.level(engine_id), "loading the KV of %s failed: %s", request_id, error
        )
