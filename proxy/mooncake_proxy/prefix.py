"""Which instance has seen which prompt prefix: chained block hashes, no tokenizer needed."""

from __future__ import annotations

from collections import OrderedDict
from zlib import crc32

# Bytes per hashed block of text, and how many blocks of a prompt are looked at.
BLOCK_BYTES = 256
MAX_BLOCKS = 256
BYTES_PER_TOKEN = 4


def block_hashes(prompt: bytes) -> tuple[int, ...]:
    """A hash per whole block, each covering everything before it too.

    32 bits: a collision costs one worse choice, never a wrong answer.
    """
    hashes = []
    value = 0
    for start in range(
        0, min(len(prompt), MAX_BLOCKS * BLOCK_BYTES) - BLOCK_BYTES + 1, BLOCK_BYTES
    ):
        value = crc32(prompt[start : start + BLOCK_BYTES], value)
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
                found[name] = position * BLOCK_BYTES // BYTES_PER_TOKEN
        return found

    def forget(self, name: str) -> None:
        """An instance is gone, or restarted with an empty cache."""
        for holders in self._holders.values():
            holders.discard(name)
