"""What the scheduler asks of whoever moves KV between instances."""

from __future__ import annotations

from typing import Protocol

from mooncake_engine.messages import KVTransferParams
from mooncake_engine.scheduling.request import Request


class KVConnector(Protocol):
    """Moves KV. Calls return at once; I/O is elsewhere."""

    def announce(self, request: Request) -> None:
        """A prefill for a peer has come (``sends_kv``): its KV may leave as it is computed."""
        ...

    def offer(self, request: Request, block_ids: list[int]) -> KVTransferParams | None:
        """Hold a finished prefill's blocks for a peer until ``Scheduler.release`` is called.

        Returns:
            What the peer needs to fetch the KV; None if it is sent there.
        """
        ...

    def withdraw(self, request_id: str) -> None:
        """Stop holding or sending; ``Scheduler.release`` follows when nobody uses the blocks."""
        ...

    def expect(self, request: Request) -> None:
        """A request whose KV comes from a peer has come: keep the peer's lease alive, if any."""
        ...

    def load(self, request: Request, first_token: int) -> None:
        """Load the prompt's KV from that token on; ``Scheduler.load_ended`` follows."""
        ...

    def cancel(self, request_id: str) -> None:
        """Give up on an expected request.

        If a load was started, ``Scheduler.load_ended`` follows when it is drained.
        """
        ...
