"""Which KV of the draft model is in place: pure bookkeeping over block ids and digests.

The draft model's KV lies in blocks of the same ids as the model's, but it is there only where the
draft model has run: not for a prompt whose KV came from a peer, nor for a block that was swapped in
or copied. What a block holds is known by the digest of all tokens up to its end, so that requests
with a common beginning share the draft model's work as they share the model's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from mooncake_engine.kv_cache.block_pool import extend_chain

BlocksFrom = Callable[[int], list[int]]
"""A request's block table from an index on."""


class TokenRange(NamedTuple):
    """Tokens of a request, by position: ``stop`` is behind the last."""

    start: int
    stop: int


@dataclass(slots=True)
class _Progress:
    """How far the draft model has come with a request.

    Args:
        chain: digests of the request's full blocks, as far as they were needed.
        num_tokens: leading tokens whose draft KV is in place.
        num_named: leading blocks that are full of it, in the books, and never written again: so not
            that of the last token, which is run once more and may be copied for it.
        drafted: tokens that were drafted behind these ones; they may have been rejected since.
        num_drafted: how many of them ran.
        tail: the other blocks, as they were when anything was written to them last.
    """

    chain: list[bytes] = field(default_factory=list)
    num_tokens: int = 0
    num_named: int = 0
    drafted: Sequence[int] = ()
    num_drafted: int = 0
    tail: list[int] = field(default_factory=list)


class DraftKV:
    """The books of one rank's draft KV. What a request costs depends on its new tokens alone.

    Args:
        block_size: tokens per block.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._content: dict[int, bytes] = {}
        self._writers: dict[int, _Progress] = {}  # who ran in a block last
        self._progress: dict[str, _Progress] = {}

    def claim(
        self,
        request_id: str,
        token_ids: Sequence[int],
        blocks_from: BlocksFrom,
        limit: int,
        cache_salt: str = "",
    ) -> TokenRange:
        """Which tokens of a request the draft model is to run next: from now on they count as run,
        also for those who claim after it and run in the same pass.

        Args:
            request_id: whose.
            token_ids: all its tokens; the last one is always run.
            blocks_from: its block table.
            limit: how many to run at most; may be 0.
            cache_salt: the request's: it finds only what was run under the same one.
        """
        progress = self._progress.setdefault(request_id, _Progress())
        extend_chain(progress.chain, token_ids, self._block_size, cache_salt)
        progress.num_tokens = self._confirm(progress, token_ids, blocks_from)
        last = len(token_ids) - 1
        self._name_full_blocks(progress, last)
        self._find_named_blocks(progress, last)
        start = min(progress.num_tokens, last)
        stop = min(start + limit, len(token_ids))
        self._overwrite(progress, start, stop)
        progress.num_tokens = max(progress.num_tokens, stop)
        self._name_full_blocks(progress, last)
        return TokenRange(start, stop)

    def add_draft(self, request_id: str, drafted: Sequence[int]) -> None:
        """The draft model runs the next draft token behind all tokens of a request.

        Args:
            request_id: whose.
            drafted: its draft tokens; what they are is looked at in the next ``claim``.
        """
        progress = self._progress[request_id]
        position = progress.num_tokens + progress.num_drafted
        progress.drafted = drafted
        progress.num_drafted += 1
        self._overwrite(progress, position, position + 1)

    def forget(self, request_ids: Iterable[str]) -> None:
        """These requests have ended, or begin anew; what their blocks hold stays known."""
        for request_id in request_ids:
            self._progress.pop(request_id, None)

    def _confirm(
        self, progress: _Progress, token_ids: Sequence[int], blocks_from: BlocksFrom
    ) -> int:
        """How many leading tokens are in place by the request's own passes: draft tokens only if
        they were accepted, and nothing in a block that has been copied since, or was given away
        and has come back."""
        known = progress.num_tokens
        drafted = progress.drafted[: progress.num_drafted]
        for token_id, draft_id in zip(token_ids[known:], drafted, strict=False):
            if token_id != draft_id:
                break
            known += 1
        written, progress.tail = progress.tail, blocks_from(progress.num_named)
        progress.drafted, progress.num_drafted = (), 0
        for index, (old, new) in enumerate(zip(written, progress.tail, strict=False)):
            if old != new or self._writers.get(new) is not progress:
                return min(known, (progress.num_named + index) * self._block_size)
        return known

    def _name_full_blocks(self, progress: _Progress, last: int) -> None:
        count = progress.num_tokens // self._block_size - progress.num_named
        if count > 0:
            digests = progress.chain[progress.num_named :]
            self._content.update(zip(progress.tail[:count], digests, strict=False))
            self._advance(progress, count, last)

    def _find_named_blocks(self, progress: _Progress, last: int) -> None:
        """Blocks that others have filled with the same tokens follow without a gap."""
        if progress.num_tokens % self._block_size:
            return
        digests = progress.chain[progress.num_named :]
        pairs = zip(progress.tail, digests, strict=False)
        is_named = [self._content.get(block_id) == digest for block_id, digest in pairs]
        count = [*is_named, False].index(False)
        found = (progress.num_named + count) * self._block_size
        progress.num_tokens = max(progress.num_tokens, found)
        self._advance(progress, count, last)

    def _advance(self, progress: _Progress, num_blocks: int, last: int) -> None:
        """Over that many blocks, as far as they lie before the last token's."""
        count = min(num_blocks, last // self._block_size - progress.num_named)
        del progress.tail[:count]
        progress.num_named += count

    def _overwrite(self, progress: _Progress, start: int, stop: int) -> None:
        """What was in the request's own blocks there is gone; named ones get the same again."""
        if start < stop:
            first = max(start // self._block_size - progress.num_named, 0)
            last = -(-stop // self._block_size) - progress.num_named
            for block_id in progress.tail[first : max(last, 0)]:
                self._content.pop(block_id, None)
                self._writers[block_id] = progress
