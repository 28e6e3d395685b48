"""Which instance has seen which prompt prefix: chained block hashes.

Of token ids where they are known, from the request itself or by `--tokenizer`: then a prompt is the
same prompt however it was written. Of bytes otherwise.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from zlib import crc32

# What a block stands for, and how many blocks of a prompt are looked at.
TOKENS_PER_BLOCK = 64
BYTES_PER_TOKEN = 4
MAX_BLOCKS = 256
BLOCK_BYTES = TOKENS_PER_BLOCK * BYTES_PER_TOKEN
# Text and token ids of equal bytes are different prompts.
_TEXT, _TOKENS = 0, 1


def text_hashes(prompt: bytes) -> tuple[int, ...]:
    """A hash per whole block of about so many tokens, each covering everything before it too."""
    return _chain(prompt, _TEXT)


def token_hashes(token_ids: Sequence[int]) -> tuple[int, ...]:
    """The same for blocks of exactly so many tokens."""
    first = [token & 0xFFFFFFFF for token in token_ids[: MAX_BLOCKS * TOKENS_PER_BLOCK]]
    return _chain(array("I", first).tobytes(), _TOKENS)


def _chain(data: bytes, value: int) -> tuple[int, ...]:
    """32 bits: a collision costs one worse choice, never a wrong answer."""
    hashes = []
    for start in range(0, min(len(data), MAX_BLOCKS * BLOCK_BYTES) - BLOCK_BYTES + 1, BLOCK_BYTES):
        value = crc32(data[start : start + BLOCK_BYTES], value)
        hashes.append(value)
    return tuple(hashes)


class PrefixIndex:
    """Remembers where blocks were prefilled, the latest `capacity` of them."""

    def __init__(self, capacity: int = 200_000) -> None:
        self._capacity = capacity
        self._holders: OrderedDict[int, set[str]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._holders)

    def record(self, hashes: tuple[int, ...], name: str) -> None:
        """An instance has just prefilled these blocks."""
        holders = self._holders
        for value in hashes:
            holders.setdefault(value, set()).add(name)
            holders.move_to_end(value)
        while len(holders) > self._capacity:
            holders.popitem(last=False)

    def cached_tokens(self, hashes: tuple[int, ...]) -> dict[str, int]:
        """Per instance, about how many leading tokens it holds."""
        found: dict[str, int] = {}
        still: set[str] | None = None
        for position, value in enumerate(hashes, 1):
            holders = self._holders.get(value)
            still = holders if still is None or holders is None else still & holders
            if not holders or not still:
                break
            for name in still:
                found[name] = position * TOKENS_PER_BLOCK
        return found

    def forget(self, name: str) -> None:
        """An instance is gone, or restarted with an empty cache."""
        for holders in self._holders.values():
            holders.discard(name)
