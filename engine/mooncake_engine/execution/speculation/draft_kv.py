"""Tracks which KV of the draft model is valid: pure bookkeeping over block ids and digests.

The draft model's KV is in blocks with the same ids as the model's, but it is valid only where the
draft model has run: not for a prompt whose KV came from a peer, nor for a block that was swapped in
or copied. The content of a block is identified by the digest of all tokens up to its end, so that
requests with a common prefix share the draft model's KV as they share the model's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from mooncake_engine.kv_cache.block_pool import extend_block_hashes

BlocksFrom = Callable[[int], list[int]]
"""Returns a request's block table from a given index on."""


class TokenRange(NamedTuple):
    """A range of tokens of a request, by position; ``stop`` is exclusive."""

    start: int
    stop: int


@dataclass(slots=True)
class _Progress:
    """How far the draft model has run a request.

    Args:
        block_hashes: digests of the request's full blocks, as far as they were needed.
        num_tokens: number of leading tokens whose draft KV is valid.
        num_recorded: number of leading blocks that are full of valid draft KV, are recorded by
            digest, and will not be written again. The block of the last token is not one of them:
            that token runs once more, and its block may be copied for that.
        drafted: tokens that were drafted after these tokens; they may have been rejected since.
        num_drafted: how many of the drafted tokens the draft model has run.
        tail: the ids of the other blocks, as of the last write to any of them.
    """

    block_hashes: list[bytes] = field(default_factory=list)
    num_tokens: int = 0
    num_recorded: int = 0
    drafted: Sequence[int] = ()
    num_drafted: int = 0
    tail: list[int] = field(default_factory=list)


class DraftKV:
    """Tracks the draft KV of one rank. The cost of a call depends only on a request's new tokens.

    Args:
        block_size: tokens per block.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._content: dict[int, bytes] = {}
        self._writers: dict[int, _Progress] = {}  # the last request that wrote to each block
        self._progress: dict[str, _Progress] = {}

    def claim(
        self,
        request_id: str,
        token_ids: Sequence[int],
        blocks_from: BlocksFrom,
        limit: int,
        cache_salt: str = "",
    ) -> TokenRange:
        """Claim the tokens of a request that the draft model has to run next. From now on they
        count as run, also for requests that claim later and run in the same pass.

        Args:
            request_id: id of the request.
            token_ids: all tokens of the request; the last one always has to run.
            blocks_from: its block table.
            limit: the most tokens to claim; may be 0.
            cache_salt: the request's salt; blocks are shared only between equal salts.
        """
        progress = self._progress.setdefault(request_id, _Progress())
        extend_block_hashes(progress.block_hashes, token_ids, self._block_size, cache_salt)
        progress.num_tokens = self._count_valid(progress, token_ids, blocks_from)
        last = len(token_ids) - 1
        self._record_full_blocks(progress, last)
        self._find_recorded_blocks(progress, last)
        start = min(progress.num_tokens, last)
        stop = min(start + limit, len(token_ids))
        self._overwrite(progress, start, stop)
        progress.num_tokens = max(progress.num_tokens, stop)
        self._record_full_blocks(progress, last)
        return TokenRange(start, stop)

    def add_draft(self, request_id: str, drafted: Sequence[int]) -> None:
        """Record that the draft model runs the next draft token of a request.

        Args:
            request_id: id of the request.
            drafted: its draft tokens; their values are read in the next ``claim``.
        """
        progress = self._progress[request_id]
        position = progress.num_tokens + progress.num_drafted
        progress.drafted = drafted
        progress.num_drafted += 1
        self._overwrite(progress, position, position + 1)

    def forget(self, request_ids: Iterable[str]) -> None:
        """Forget requests that have ended or start anew. What their blocks hold stays known."""
        for request_id in request_ids:
            self._progress.pop(request_id, None)

    def _count_valid(
        self, progress: _Progress, token_ids: Sequence[int], blocks_from: BlocksFrom
    ) -> int:
        """The number of leading tokens whose draft KV is valid by the request's own passes. That
        includes draft tokens only if they were accepted, and ends at a block that was copied since,
        or was freed and allocated again."""
        known = progress.num_tokens
        drafted = progress.drafted[: progress.num_drafted]
        for token_id, draft_id in zip(token_ids[known:], drafted, strict=False):
            if token_id != draft_id:
                break
            known += 1
        written, progress.tail = progress.tail, blocks_from(progress.num_recorded)
        progress.drafted, progress.num_drafted = (), 0
        for index, (old, new) in enumerate(zip(written, progress.tail, strict=False)):
            if old != new or self._writers.get(new) is not progress:
                return min(known, (progress.num_recorded + index) * self._block_size)
        return known

    def _record_full_blocks(self, progress: _Progress, last: int) -> None:
        count = progress.num_tokens // self._block_size - progress.num_recorded
        if count > 0:
            digests = progress.block_hashes[progress.num_recorded :]
            self._content.update(zip(progress.tail[:count], digests, strict=False))
            self._advance(progress, count, last)

    def _find_recorded_blocks(self, progress: _Progress, last: int) -> None:
        """Extend the valid tokens by the next blocks that other requests have filled with the same
        tokens."""
        if progress.num_tokens % self._block_size:
            return
        digests = progress.block_hashes[progress.num_recorded :]
        pairs = zip(progress.tail, digests, strict=False)
        is_recorded = [self._content.get(block_id) == digest for block_id, digest in pairs]
        count = [*is_recorded, False].index(False)
        found = (progress.num_recorded + count) * self._block_size
        progress.num_tokens = max(progress.num_tokens, found)
        self._advance(progress, count, last)

    def _advance(self, progress: _Progress, num_blocks: int, last: int) -> None:
        """Move blocks from the tail to the recorded ones, up to the block of the last token."""
        count = min(num_blocks, last // self._block_size - progress.num_recorded)
        del progress.tail[:count]
        progress.num_recorded += count

    def _overwrite(self, progress: _Progress, start: int, stop: int) -> None:
        """Note a write to a range of tokens: it replaces the content of the tail's blocks. Recorded
        blocks are rewritten with the same values."""
        if start < stop:
            first = max(start // self._block_size - progress.num_recorded, 0)
            last = -(-stop // self._block_size) - progress.num_recorded
            for block_id in progress.tail[first : max(last, 0)]:
                self._content.pop(block_id, None)
                self._writers[block_id] = progress
