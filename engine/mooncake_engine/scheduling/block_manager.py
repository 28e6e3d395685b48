"""Block tables of requests: prefix hits, growth, publication, release."""

from __future__ import annotations

from mooncake_engine.kv.block_pool import BlockPool
from mooncake_engine.kv.prefix import extend_chain
from mooncake_engine.scheduling.request import Request


class BlockManager:
    """Gives requests the blocks they need; all or nothing, every time.

    Args:
        num_blocks: size of the pool.
        block_size: tokens per block.
        prefix_caching: reuse blocks of equal prefixes.
    """

    def __init__(self, num_blocks: int, block_size: int, *, prefix_caching: bool) -> None:
        self.pool = BlockPool(num_blocks)
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks hold that many tokens."""
        return -(-num_tokens // self.block_size)

    def begin(self, request: Request, num_tokens: int, *, cacheable: int, reserve: int = 0) -> bool:
        """Give a request without blocks a table for ``num_tokens``, cached prefix first.

        On success ``num_computed`` is the length of the cached prefix.

        Args:
            request: owns no blocks.
            num_tokens: tokens that the table has to hold.
            cacheable: at most so many leading tokens may come from the cache.
            reserve: blocks that must stay free for others.
        """
        found = self._find_prefix(request, cacheable)
        wanted = self.blocks_for(num_tokens) - len(found)
        if wanted + self.pool.count_free(found) + reserve > self.pool.num_free:
            return False
        self.pool.share(found)
        fresh = self.pool.allocate(wanted)
        assert fresh is not None, "the pool shrank between the count and the allocation"
        request.block_ids = found + fresh
        request.num_published = len(found)
        request.num_computed = len(found) * self.block_size
        self.num_queried_tokens += num_tokens
        self.num_hit_tokens += request.num_computed
        return True

    def grow(self, request: Request, num_tokens: int) -> tuple[int, ...] | None:
        """Extend a table to hold ``num_tokens``; returns the new blocks, or None if it can't."""
        wanted = self.blocks_for(num_tokens) - len(request.block_ids)
        if wanted <= 0:
            return ()
        fresh = self.pool.allocate(wanted)
        if fresh is None:
            return None
        request.block_ids.extend(fresh)
        return tuple(fresh)

    def publish(self, request: Request) -> None:
        """Make full blocks whose KV is there known to later requests."""
        if not self.prefix_caching:
            return
        complete = request.num_computed // self.block_size
        if complete <= request.num_published:
            return
        extend_chain(request.chain, request.token_ids, self.block_size)
        for index in range(request.num_published, complete):
            self.pool.publish(request.block_ids[index], request.chain[index])
        request.num_published = complete

    def release(self, request: Request) -> None:
        """Take the table back; the request starts over if it runs again."""
        self.pool.release(self.detach(request))

    def detach(self, request: Request) -> list[int]:
        """Take the table from the request without releasing it: the caller owns it now."""
        table, request.block_ids = request.block_ids, []
        request.num_computed = request.num_published = 0
        return table

    def _find_prefix(self, request: Request, cacheable: int) -> list[int]:
        if not self.prefix_caching:
            return []
        extend_chain(request.chain, request.token_ids, self.block_size)
        return self.pool.find(request.chain[: cacheable // self.block_size])
