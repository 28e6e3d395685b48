"""Prompt lookup (after Saxena 2023): drafts the tokens that followed the same n-gram before."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from mooncake_engine.execution.speculation.drafts import DraftRequest, StepDrafts, make_draft

_MASK = (1 << 64) - 1
_FACTOR = 0x9E3779B97F4A7C15  # odd, so that multiplication modulo 2**64 is invertible
_MAX_CANDIDATES = 16
"""The most earlier occurrences that a lookup compares."""
_MIN_BULK_TOKENS = 64
"""The fewest tokens for which a new index is built with numpy."""


class NGramIndex:
    """Index of the n-grams of a growing sequence: finds earlier occurrences of its last tokens.

    It has chains of equal hashes, as in LZ77 compressors: each position links to the previous
    position at which the same ``shortest`` tokens end. The cost of growing depends on the number of
    new tokens, and a lookup follows a few links, however long the sequence is.

    Args:
        shortest: the number of last tokens that a match must have in common.
        longest: the number of last tokens that are compared to find the best match.
    """

    def __init__(self, shortest: int, longest: int) -> None:
        self._shortest = shortest
        self._longest = longest
        self._last: dict[int, int] = {}  # hash of an n-gram -> end of its newest occurrence
        self._earlier: list[int] = [0] * shortest  # by end -> end of the previous one, 0 for none

    def extend(self, token_ids: Sequence[int]) -> None:
        """Add the new tokens of the sequence; ``token_ids`` must start with the known tokens."""
        if not self._last and len(token_ids) >= _MIN_BULK_TOKENS:
            self._build(token_ids)
        shortest, last, earlier = self._shortest, self._last, self._earlier
        for end in range(len(earlier), len(token_ids) + 1):
            key = 0  # the same hash as in ``_build``
            for token_id in token_ids[end - shortest : end]:
                key = (key * _FACTOR + token_id) & _MASK
            earlier.append(last.get(key, 0))
            last[key] = end

    def find(self, token_ids: Sequence[int], count: int) -> list[int]:
        """The ``count`` tokens that followed the longest earlier match of the last tokens; the
        newest match if several are as long. If fewer tokens follow it, they are repeated.
        """
        best, best_length, end = 0, self._shortest - 1, len(token_ids)
        match = self._earlier[end] if end < len(self._earlier) else 0
        for _ in range(_MAX_CANDIDATES):
            if not match or best_length == self._longest:
                break
            length = self._match_length(token_ids, match, end)
            if length > best_length:
                best, best_length = match, length
            match = self._earlier[match]
        if not best:
            return []
        period = end - best
        return [token_ids[best + index % period] for index in range(count)]

    def _match_length(self, token_ids: Sequence[int], match: int, end: int) -> int:
        """How many tokens before both ends are equal, up to ``longest``."""
        limit = min(self._longest, match)
        for length in range(limit):
            if token_ids[match - 1 - length] != token_ids[end - 1 - length]:
                return length
        return limit

    def _build(self, token_ids: Sequence[int]) -> None:
        """As ``extend``, for a whole prompt at once."""
        tokens = np.array(token_ids, dtype=np.uint64)
        count = len(tokens) - self._shortest + 1
        keys = np.zeros(count, dtype=np.uint64)
        for offset in range(self._shortest):
            keys = keys * np.uint64(_FACTOR) + tokens[offset : offset + count]
        order = np.argsort(keys, kind="stable")
        ends = np.arange(self._shortest, len(tokens) + 1)
        earlier = np.zeros(count, dtype=np.int64)
        is_again = keys[order[1:]] == keys[order[:-1]]
        earlier[order[1:][is_again]] = ends[order[:-1][is_again]]
        self._earlier += earlier.tolist()
        self._last = dict(zip(keys.tolist(), ends.tolist(), strict=True))


class NGramProposer:
    """Drafts tokens by looking up a request's last tokens in its prompt and output.

    Args:
        shortest, longest: see ``NGramIndex``.
    """

    def __init__(self, shortest: int, longest: int) -> None:
        self._lengths = (shortest, longest)
        self._indexes: dict[str, NGramIndex] = {}

    def propose(self, wanted: Sequence[DraftRequest]) -> StepDrafts:
        drafts = {}
        for state, num_tokens in wanted:
            index = self._indexes.get(state.request_id)
            if index is None:
                index = self._indexes[state.request_id] = NGramIndex(*self._lengths)
            index.extend(state.token_ids)
            draft = make_draft(state, index.find(state.token_ids, num_tokens))
            if draft is not None:
                drafts[state.request_id] = draft
        return StepDrafts(drafts)

    def forget(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self._indexes.pop(request_id, None)

    def close(self) -> None:
        self._indexes.clear()
