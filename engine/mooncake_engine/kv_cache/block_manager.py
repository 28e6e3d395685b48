"""Manages the block tables of requests: prefix hits, growth, copy on write, swapping, release."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from mooncake_engine.kv_cache.block_pool import BlockEvents, BlockPool, extend_block_hashes
from mooncake_engine.messages import LOCAL_HIT

if TYPE_CHECKING:
    from mooncake_engine.scheduling.request import Request

BlockCopies = tuple[tuple[int, int], ...]
"""``(source, target)`` block ids."""


class Growth(NamedTuple):
    """The blocks that a table has gained.

    Args:
        at: index in the table of the first new block.
        block_ids: the new blocks.
        copied: ``(source, target)`` if the first new block replaces a shared one, whose content
            must be copied before the table's request writes.
    """

    at: int = 0
    block_ids: tuple[int, ...] = ()
    copied: tuple[int, int] | None = None


NO_GROWTH = Growth()


class CachedInUse(NamedTuple):
    """How many cached blocks of a request other tables owned at a lookup. Sharing these takes no
    free block, so an upper bound of their number tells that a request still does not fit.

    Later there are at most as many more as ``BlockPool.num_claims`` has grown by, as long as the
    block behind the prefix that was found is not cached: then no more than that prefix is found,
    and each of its blocks that is in use, but was not, has been claimed since.

    Args:
        num_found: blocks of the cached prefix.
        num_in_use: how many of them other tables owned.
        num_claims: ``BlockPool.num_claims`` at the lookup.
    """

    num_found: int
    num_in_use: int
    num_claims: int


class BlockManager:
    """Allocates the blocks of requests. Each call gets all the blocks that it needs, or none.

    The scheduler owns one, with a block pool on the device and one in host memory.

    Args:
        num_blocks: number of blocks on the device.
        block_size: tokens per block.
        prefix_caching: whether requests share the blocks of equal prefixes.
        num_host_blocks: number of blocks in host memory, for swapping.
        events: receives the changes of the prefix cache; None publishes none.

    Attributes:
        num_queried_tokens: tokens of the tables of new requests that may use the prefix cache; the
            base of the prefix hit rate.
        num_hit_tokens: how many of these were found in the prefix cache.
        num_shared_blocks: blocks that were replaced because another block has the same content.
        replaced: replaced blocks that ``take_replaced`` has not returned yet.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        prefix_caching: bool,
        num_host_blocks: int = 0,
        events: BlockEvents | None = None,
    ) -> None:
        self.pool = BlockPool(num_blocks, events)
        self.events = events
        self.host_pool = BlockPool(num_host_blocks)
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0
        self.num_shared_blocks = 0
        self.replaced: list[int] = []

    def blocks_for(self, num_tokens: int) -> int:
        """Returns the number of blocks that hold that many tokens."""
        return -(-num_tokens // self.block_size)

    def allocate(
        self, request: Request, num_tokens: int, *, cacheable: int, reserve: int = 0
    ) -> bool:
        """Allocate a table for ``num_tokens`` tokens, which begins with the blocks of the cached
        prefix. On success ``num_computed`` is the length of that prefix.

        Args:
            request: the request; owns no blocks.
            num_tokens: tokens that the table has to hold.
            cacheable: maximum number of leading tokens to take from the prefix cache.
            reserve: number of blocks that must stay free.

        Returns:
            False if too few blocks are free.
        """
        num_blocks = self.blocks_for(num_tokens)
        if self.lacks_free(request, num_blocks + reserve, cacheable):
            return False
        found = self._find_prefix(request, cacheable)
        self.pool.share(found)
        fresh = self.pool.allocate(num_blocks - len(found))
        assert fresh is not None, "the pool shrank between the count and the allocation"
        request.block_ids = found + fresh
        request.num_published = len(found)
        request.num_computed = len(found) * self.block_size
        request.prompt_hits = {LOCAL_HIT: request.num_computed}
        if self.prefix_caching and not request.num_preemptions and not request.awaits_scores:
            self.num_queried_tokens += num_tokens
            self.num_hit_tokens += request.num_computed
        return True

    def count_cached(self, request: Request, cacheable: int) -> int:
        """Returns how many leading tokens ``allocate`` would find in the prefix cache; changes
        nothing."""
        return len(self._find_prefix(request, cacheable)) * self.block_size

    def lacks_free(self, request: Request, num_blocks: int, cacheable: int) -> bool:
        """Whether too few blocks are free for a request.

        A request that does not fit is asked about in each step, so its prefix is looked up again
        only when it might fit.

        Args:
            request: the request; owns no blocks.
            num_blocks: blocks of its table, and blocks that must stay free.
            cacheable: maximum number of leading tokens to take from the prefix cache.
        """
        num_missing = num_blocks - self.pool.num_free
        if num_missing <= 0:
            return False
        if num_missing > self._most_in_use(request, cacheable):
            return True
        found = self._find_prefix(request, cacheable)
        num_in_use = len(found) - self.pool.count_free(found)
        request.cached_in_use = CachedInUse(len(found), num_in_use, self.pool.num_claims)
        return num_missing > num_in_use

    def _most_in_use(self, request: Request, cacheable: int) -> int:
        """Returns an upper bound of the cached blocks of a request that other tables own."""
        most = cacheable // self.block_size if self.prefix_caching else 0
        if (known := request.cached_in_use) is None:
            return most
        if known.num_found < most:
            following = request.block_hashes[known.num_found : known.num_found + 1]
            if not following or following[0] in self.pool:
                return most  # more may be found now
        return min(most, known.num_in_use + self.pool.num_claims - known.num_claims)

    def fork(self, request: Request, parent: Request) -> None:
        """Share a sibling's blocks of the prompt, including the last, possibly partial one.

        As much of the prompt counts as computed as for the parent. The first of the two to write to
        the last block gets a copy of it.

        Args:
            request: the request; owns no blocks.
            parent: the sibling; its table holds the whole prompt.
        """
        prompt = request.num_prompt_tokens
        request.block_ids = parent.block_ids[: self.blocks_for(prompt)]
        self.pool.share(request.block_ids)
        complete = prompt // self.block_size
        request.block_hashes = parent.block_hashes[:complete]
        request.num_published = min(parent.num_published, complete)
        request.num_computed = min(parent.num_computed, prompt)
        request.note_cached(parent.num_cached_tokens)
        request.prompt_hits = {LOCAL_HIT: prompt}
        request.share_offers(parent)

    def may_share_later(self, parent: Request) -> bool:
        """Whether a ``fork`` from ``parent`` is valid if no copy on write follows at once.

        It is not if the parent has filled the prompt's last block with its own tokens, or is about
        to: the block is cached with them, and the fork would write over it once the parent has
        ended. Nor is it while the parent has yet to write to that block and owns blocks behind it
        for drafts.
        """
        last, num_in_last = divmod(parent.num_prompt_tokens, self.block_size)
        if num_in_last and parent.num_scheduled_with_drafts // self.block_size > last:
            return False
        writes_to_it = parent.num_scheduled // self.block_size == last
        return not writes_to_it or len(parent.block_ids) <= last + 1

    def num_missing(self, request: Request, num_tokens: int) -> int:
        """Returns the blocks that ``grow`` would allocate: for new tokens, and to copy on write."""
        wanted = -(-num_tokens // self.block_size) - len(request.block_ids)
        return max(wanted + self.writes_shared(request), 0)

    def num_unfilled(self, request: Request) -> int:
        """Returns the blocks of a table that hold no computed token: while a request loads its KV,
        those that the load writes to, which no other table shares."""
        return len(request.block_ids) - self.blocks_for(request.num_computed)

    def grow(self, request: Request, num_tokens: int) -> Growth | None:
        """Grow a table to hold ``num_tokens`` tokens, with blocks of its own from ``num_scheduled``
        on; None if too few blocks are free."""
        table = request.block_ids
        block_size = self.block_size
        # Inlines writes_shared: this runs for every decode.
        written = (request.num_computed + request.num_in_flight) // block_size
        is_shared = written < len(table) and self.pool.references[table[written]] > 1
        wanted = -(-num_tokens // block_size) - len(table) + is_shared
        if wanted <= 0:
            return NO_GROWTH
        fresh = self.pool.allocate(wanted)
        if fresh is None:
            return None
        copied = None
        if is_shared:
            is_last = request.num_scheduled // self.block_size == len(table) - 1
            assert is_last, "only a table's last block is shared and written to"
            copied = (table.pop(), fresh[0])
            self.pool.release(copied[:1])
        growth = Growth(len(table), tuple(fresh), copied)
        table.extend(fresh)
        return growth

    def owns_next_slot(self, request: Request, position: int) -> bool:
        """Whether a table has the block of a position and shares it with no other: then ``grow`` up
        to that position would change nothing."""
        table = request.block_ids
        index = position // self.block_size
        return index < len(table) and self.pool.references[table[index]] == 1

    def num_free_tokens(self, request: Request, num_tokens: int) -> int:
        """Returns how many tokens beyond ``num_tokens`` a table could hold with all free blocks."""
        num_blocks = len(request.block_ids) + self.pool.num_free
        return num_blocks * self.block_size - num_tokens

    def allocate_drafts(self, request: Request, num_tokens: int) -> Growth:
        """Grow a table to hold ``num_tokens`` tokens, the last of which are drafts and may be
        rejected.

        Args:
            request: the request; its table has grown for the tokens before the drafts.
            num_tokens: tokens with the drafts, of which there are at most ``num_free_tokens``.
        """
        table = request.block_ids
        wanted = -(-num_tokens // self.block_size) - len(table)
        if wanted <= 0:
            return NO_GROWTH
        fresh = self.pool.allocate(wanted)
        assert fresh is not None, "blocks were counted before they were taken"
        growth = Growth(len(table), tuple(fresh))
        table.extend(fresh)
        return growth

    def free_drafts(self, request: Request) -> None:
        """Free the blocks lent for drafts that hold no computed token and that no step in flight
        writes to."""
        kept = -(-request.num_scheduled_with_drafts // self.block_size)
        if kept < len(request.block_ids):
            self.pool.release(request.block_ids[kept:])
            del request.block_ids[kept:]

    def publish(self, request: Request, *, shares: bool = True) -> None:
        """Add a request's full, computed blocks to the prefix cache.

        Args:
            request: the request.
            shares: whether to replace a block by a cached one with the same content; the replaced
                one is then among ``take_replaced``. False while a peer may access the blocks.
        """
        complete = request.num_computed // self.block_size
        if complete <= request.num_published:
            return
        if not self.prefix_caching or not request.has_verified_kv:
            return
        salt = request.spec.cache_salt
        extend_block_hashes(request.block_hashes, request.token_ids, self.block_size, salt)
        new = []
        for index in range(request.num_published, complete):
            digest = request.block_hashes[index]
            was_known = digest in self.pool
            known = self.pool.publish(request.block_ids[index], digest)
            if not was_known and digest in self.pool:
                new.append(index)
            if shares and known != request.block_ids[index]:
                self._share_equal(request, index, known)
        request.num_published = complete
        if self.events is not None and new:
            self._report_stored(self.events, request, new)

    def _share_equal(self, request: Request, index: int, known: int) -> None:
        block_id = request.block_ids[index]
        if request.sends_kv or self.pool.references[block_id] > 1:
            return  # it is being sent, or shared with a sibling
        self.pool.share((known,))
        request.block_ids[index] = known
        request.changed_at = index if request.changed_at is None else request.changed_at
        self.replaced.append(block_id)
        self.num_shared_blocks += 1

    def take_replaced(self) -> list[int]:
        """Returns and clears the blocks that tables have replaced by others of the same content.
        The caller releases them once no step in flight reads them."""
        taken, self.replaced = self.replaced, []
        return taken

    def swap_out(self, requests: Sequence[Request]) -> BlockCopies | None:
        """Move tables to host blocks and free their device blocks. A block that several tables
        share is copied once. ``num_computed`` is kept.

        Returns:
            ``(block, host block)`` pairs to copy; None if too few host blocks are free.
        """
        blocks = list(dict.fromkeys(b for request in requests for b in request.block_ids))
        host_blocks = self.host_pool.allocate(len(blocks))
        if host_blocks is None:
            return None
        target = dict(zip(blocks, host_blocks, strict=True))
        for request in requests:
            request.host_block_ids = [target[block_id] for block_id in request.block_ids]
            self.host_pool.share(request.host_block_ids)
            self.pool.release(request.block_ids)
            request.block_ids = []
            request.num_published = 0
        self.host_pool.release(host_blocks)
        return tuple(target.items())

    def swap_in(self, requests: Sequence[Request], *, reserve: int = 0) -> BlockCopies | None:
        """Move tables back to device blocks and free their host blocks.

        Args:
            requests: requests that are swapped out.
            reserve: number of blocks that must stay free.

        Returns:
            ``(host block, block)`` pairs to copy; None if too few blocks are free.
        """
        host_blocks = list(dict.fromkeys(b for request in requests for b in request.host_block_ids))
        if len(host_blocks) + reserve > self.pool.num_free:
            return None
        blocks = self.pool.allocate(len(host_blocks))
        assert blocks is not None, "the pool shrank between the count and the allocation"
        target = dict(zip(host_blocks, blocks, strict=True))
        for request in requests:
            request.block_ids = [target[block_id] for block_id in request.host_block_ids]
            self.pool.share(request.block_ids)
            self.drop_swapped(request)
        self.pool.release(blocks)
        return tuple(target.items())

    def drop_swapped(self, request: Request) -> None:
        """Free the host blocks of a request."""
        self.host_pool.release(request.host_block_ids)
        request.host_block_ids = []

    def reset_prefix_cache(self) -> bool:
        """Drop all cached prefixes. Returns False, and drops nothing, while any block is in use."""
        if self.pool.num_free < self.pool.num_blocks:
            return False
        self.pool.forget_content()
        return True

    def release(self, request: Request) -> None:
        """Free a request's table; its tokens are computed anew if it runs again."""
        self.pool.release(self.detach(request))

    def detach(self, request: Request) -> list[int]:
        """Take the table from a request without freeing it; the caller owns the table then."""
        table, request.block_ids = request.block_ids, []
        request.num_computed = request.num_published = 0
        return table

    def _report_stored(self, events: BlockEvents, request: Request, new: Sequence[int]) -> None:
        """Report newly cached blocks, with one event per run of consecutive blocks."""
        first = new[0]
        for index, following in zip(new, (*new[1:], None), strict=True):
            if following == index + 1:
                continue
            parent = request.block_hashes[first - 1] if first else None
            tokens = request.token_ids[first * self.block_size : (index + 1) * self.block_size]
            salt = request.spec.cache_salt
            events.stored(request.block_hashes[first : index + 1], parent, tokens, salt)
            first = following or 0

    def writes_shared(self, request: Request) -> bool:
        """Whether the next token is written to a block that other tables share."""
        table = request.block_ids
        written = (request.num_computed + request.num_in_flight) // self.block_size
        return written < len(table) and self.pool.references[table[written]] > 1

    def _find_prefix(self, request: Request, cacheable: int) -> list[int]:
        if not self.prefix_caching:
            return []
        salt = request.spec.cache_salt
        extend_block_hashes(request.block_hashes, request.token_ids, self.block_size, salt)
        return self.pool.find(request.block_hashes[: cacheable // self.block_size])
