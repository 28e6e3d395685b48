"""Counts how much KV was held for how long, by the reason for holding it, in byte-seconds.

On a prefill instance, leases that decode instances are slow to release take up memory; on a decode
instance, reservations that transfers have yet to fill do. A gauge of bytes would show neither:
what is lost to other requests is the product of size and time.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from mooncake_engine.kv_cache.block_manager import BlockManager
from mooncake_engine.scheduling.output_processor import OutputProcessor
from mooncake_engine.scheduling.request_queues import RequestQueues

_INTERVAL_S = 0.1
"""Seconds between two counts: the numbers change little within that."""


@dataclass(frozen=True, slots=True)
class HeldBlocks:
    """The numbers of blocks in use at one moment, by what they are held for.

    Args:
        running: all other blocks: of requests that run or are ready to, and the cached prefixes
            of requests that load the rest.
        reserved: blocks that a load writes to, or may still write to after it was cancelled.
        leased: blocks of finished prompts that a peer has yet to fetch.
        swapped: blocks in host memory.
    """

    running: int
    reserved: int
    leased: int
    swapped: int


def count_held(queues: RequestQueues, outputs: OutputProcessor, blocks: BlockManager) -> HeldBlocks:
    """Count a scheduler's blocks by what they are held for. A block with several reasons counts
    once: as leased rather than as running. One that a load writes to has a single owner.

    Looks at no block, since it runs between two steps: there may be a million of them."""
    pool, host_pool = blocks.pool, blocks.host_pool
    leased = outputs.num_leased_blocks
    reserved = outputs.num_draining_blocks
    reserved += sum(map(blocks.num_unfilled, queues.transferring.values()))
    num_used = pool.num_blocks - pool.num_free
    return HeldBlocks(
        running=num_used - leased - reserved,
        reserved=reserved,
        leased=leased,
        swapped=host_pool.num_blocks - host_pool.num_free,
    )


class KVResidency:
    """Accumulates the byte-seconds of held KV; owned by the engine core.

    Args:
        block_bytes: bytes of one block, on all ranks together.

    Attributes:
        byte_seconds: the counters, by field of ``HeldBlocks``.
    """

    def __init__(self, block_bytes: int) -> None:
        self._block_bytes = block_bytes
        self._since: float | None = None
        self.byte_seconds = {field.name: 0.0 for field in fields(HeldBlocks)}

    def is_due(self, now: float) -> bool:
        """Whether it is time to count again."""
        return self._since is None or now - self._since >= _INTERVAL_S

    def note(self, held: HeldBlocks, now: float) -> None:
        """Add the time since the last call, for which ``held`` is taken to have applied."""
        duration = 0.0 if self._since is None else now - self._since
        self._since = now
        for name in self.byte_seconds:
            self.byte_seconds[name] += getattr(held, name) * self._block_bytes * duration
