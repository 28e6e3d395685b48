"""Blocks that a peer has written, until a plan names them."""

from __future__ import annotations

from mooncake_engine.scheduling.block_manager import BlockManager
from mooncake_engine.scheduling.request import Request


class Arrivals:
    """Every loaded block, once: what shares it later finds it turned, or turned in the same step.

    Args:
        blocks: the tables.
    """

    def __init__(self, blocks: BlockManager) -> None:
        self._blocks = blocks
        self._pending: list[int] = []

    def note(self, request: Request) -> None:
        """A request's load is over; ``num_computed`` still is what was here before."""
        first = self._blocks.blocks_for(request.num_computed)
        self._pending += request.block_ids[first:]

    def take(self) -> tuple[int, ...]:
        """All of them, for the plan that is being made."""
        taken, self._pending = tuple(self._pending), []
        return taken

    def drop_freed(self) -> None:
        """Forget those that were given up before any plan, with what they hold: they are handed out
        to peers again now."""
        references = self._blocks.pool.references
        freed = [block_id for block_id in self._pending if not references(block_id)]
        if freed:
            self._blocks.pool.forget(freed)
            self._pending = [block_id for block_id in self._pending if references(block_id)]
