"""How much KV was held for how long, by what it was held for: bytes times seconds, as counters.

A prefill instance's memory is paid for by the leases that decode instances are slow to end, a
decode instance's by reservations that a transfer has yet to fill. A level shows neither: it is the
product of size and time that takes room from others.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from mooncake_engine.kv_cache.block_manager import BlockManager
from mooncake_engine.scheduling.output_processor import OutputProcessor
from mooncake_engine.scheduling.request_queues import RequestQueues

_INTERVAL_S = 0.1
"""Counting blocks takes time; levels change little within it."""


@dataclass(frozen=True, slots=True)
class HeldBlocks:
    """Blocks in use at one moment.

    Args:
        running: of requests that take part in steps, or have blocks and will soon.
        reserved: that a peer's KV comes into, or may still come into after it was given up.
        leased: of finished prompts that a peer has yet to fetch.
        swapped: in host memory.
    """

    running: int
    reserved: int
    leased: int
    swapped: int


def count_held(queues: RequestQueues, outputs: OutputProcessor, blocks: BlockManager) -> HeldBlocks:
    """What a scheduler's blocks are held for; one that is held for several reasons counts for the
    first of leases, reservations and running requests."""
    pool, host_pool = blocks.pool, blocks.host_pool
    leased = outputs.leased_blocks
    tables = [request.block_ids for request in queues.transferring.values()]
    reserved = outputs.draining_blocks.union(*tables) - leased
    num_used = pool.num_blocks - pool.num_free
    return HeldBlocks(
        running=num_used - len(leased) - len(reserved),
        reserved=len(reserved),
        leased=len(leased),
        swapped=host_pool.num_blocks - host_pool.num_free,
    )


class KVResidency:
    """Adds up who held KV.

    Args:
        block_bytes: of one block, on all ranks together.
    """

    def __init__(self, block_bytes: int) -> None:
        self._block_bytes = block_bytes
        self._since: float | None = None
        self.byte_seconds = {field.name: 0.0 for field in fields(HeldBlocks)}

    def is_due(self, now: float) -> bool:
        """Whether it is time to count again."""
        return self._since is None or now - self._since >= _INTERVAL_S

    def note(self, held: HeldBlocks, now: float) -> None:
        """What is held at ``now`` was held since the last call."""
        duration = 0.0 if self._since is None else now - self._since
        self._since = now
        for name in self.byte_seconds:
            self.byte_seconds[name] += getattr(held, name) * self._block_bytes * duration
