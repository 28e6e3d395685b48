"""Where a store's chunks are, in memory that other processes of its host read: a probe without a
message.

A table of 8-byte words in a memfd: 61 bits of a chunk's key, and a bit each for STAGING, DRAM and
SSD. A key has two buckets of eight words, one cache line each, and is in either. The store writes
whole words, which a processor does at once, and never moves one: a reader sees a chunk as it was
before a change or after it, and needs neither a lock nor a second look. What it found is a hint, as
all that a probe finds: ``pin`` decides.

What finds both its buckets full is left out, and counted in the header: then readers ask the store
about what they did not find.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import mmap
import os
import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from mooncake_kv.errors import KVConfigError
from mooncake_kv.store.chunk_keys import KEY_BYTES
from mooncake_kv.store.chunk_store import Chunk, IndexInfo, Residence, StoreObserver, Tier

NAME = "mooncake-kv-index"
HEADER_BYTES = 4096
BUCKET_WORDS = 8
BYTES_PER_CHUNK = 64 << 10
"""The size of chunks that the table has room for, twice over; larger ones leave it emptier."""
FEW_KEYS = 8
"""So many are sooner marked one by one than together."""
MIN_BUCKETS, MAX_BUCKETS = 1 << 10, 1 << 24

_MAGIC = b"KVINDEX1"
_HEADER = struct.Struct("<8s16sQQ")  # magic, epoch, buckets, chunks that are left out
_LEFT_OUT_WORD = (_HEADER.size - 8) // 8
_PAIR = struct.Struct("<QQ")
_STATE_BITS = 7
_TAG_BITS = (1 << 64) - 1 - _STATE_BITS
_STAGING, _DRAM, _SSD = 1, 2, 4
_BIT = {Residence.STAGING: _STAGING, Residence.DRAM: _DRAM, Residence.SSD: _SSD}
_RESIDENCE = tuple(
    Residence.DRAM
    if bits & 2
    else Residence.STAGING
    if bits & 1
    else Residence.SSD
    if bits & 4
    else Residence.ABSENT
    for bits in range(8)
)
"""By the bits of a word; as ``NodeStore.probe`` would say it."""

Words = npt.NDArray[np.uint64]


class ResidenceIndex:
    """The store's side: the only writer. Its owner has a lock.

    Args:
        capacity_bytes: of all tiers.
        epoch: of the store, 16 characters; a reader checks it.

    Raises:
        KVConfigError: the host has no memory for it.
    """

    def __init__(self, capacity_bytes: int, epoch: str) -> None:
        wanted = 2 * capacity_bytes // BYTES_PER_CHUNK // BUCKET_WORDS
        buckets = min(MAX_BUCKETS, max(MIN_BUCKETS, 1 << max(0, wanted - 1).bit_length()))
        self._mask = buckets - 1
        self._left_out: dict[bytes, int] = {}
        self._staging_at: dict[bytes, int] = {}
        nbytes = HEADER_BYTES + buckets * BUCKET_WORDS * 8
        self._fd = os.memfd_create(NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self._fd, nbytes)
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
            self._map = mmap.mmap(self._fd, nbytes)
        except (OSError, ValueError) as exc:
            os.close(self._fd)
            raise KVConfigError(f"{nbytes} bytes for a store's index: {exc}") from exc
        _HEADER.pack_into(self._map, 0, _MAGIC, epoch.encode(), buckets, 0)
        self._words = memoryview(self._map).cast("Q")
        self._array: Words = np.frombuffer(self._map, np.uint64)  # the same, for many at once
        self._buckets = self._array[HEADER_BYTES // 8 :].reshape(buckets, BUCKET_WORDS)
        self.info = IndexInfo(f"/proc/{os.getpid()}/fd/{self._fd}", nbytes)

    def mark(self, key: bytes, where: Residence, is_there: bool = True) -> None:
        """Say that a chunk is somewhere, or is there no longer."""
        self._change(key, *((_BIT[where], 0) if is_there else (0, _BIT[where])))

    def stage(self, keys: Sequence[bytes]) -> None:
        """Chunks are being written to memory; ``settle`` or ``unstage`` follows for each."""
        while len(keys) > FEW_KEYS and not self._left_out:
            placed = self._stage_together(keys)
            if not placed:
                break
            self._staging_at.update(placed)
            keys = [key for key in keys if key not in placed]
        for key in keys:
            at = self._change(key, _STAGING, 0)
            if at is not None:
                self._staging_at[key] = at

    def settle(self, keys: Sequence[bytes]) -> None:
        """They are written, and in memory."""
        found = [self._staging_at.pop(key, None) for key in keys]
        at = np.array([word for word in found if word is not None], np.intp)
        self._array[at] = (self._array[at] & ~_IS_STAGING) | _IS_DRAM
        if len(at) < len(keys):
            for key, word in zip(keys, found, strict=True):
                if word is None:
                    self._change(key, _DRAM, _STAGING)

    def unstage(self, key: bytes) -> None:
        """One is not written any more."""
        self._staging_at.pop(key, None)
        self._change(key, 0, _STAGING)

    def _stage_together(self, keys: Sequence[bytes]) -> dict[bytes, int]:
        """Mark those whose word no other of them wants; which word each has."""
        pairs: Words = np.frombuffer(b"".join(map(_digest, keys)), np.uint64)
        low, tags = pairs[::2], pairs[1::2] & _TAG
        mask = np.uint64(self._mask)
        near, far = (low & mask).astype(np.intp), (low >> _HALF & mask).astype(np.intp)
        words = np.concatenate((self._buckets[near], self._buckets[far]), axis=1)
        is_its = (words ^ tags[:, None]) - _ONE < _STATE  # the same tag, and a state
        # each likes other words of its buckets best, so that few want the same one
        liking = _LIKING[(pairs[1::2] >> _STATE_WIDTH & _LAST_WORD).astype(np.intp)]
        score = np.where(is_its, np.int8(2 * BUCKET_WORDS + 1), liking * (words == 0))
        best, each = score.argmax(axis=1), np.arange(len(keys))
        bucket = np.where(best < BUCKET_WORDS, near, far)
        at = HEADER_BYTES // 8 + bucket * BUCKET_WORDS + best % BUCKET_WORDS
        found = np.flatnonzero(score[each, best])
        by_word = dict(zip(at[found].tolist(), found.tolist(), strict=True))
        at, chosen = np.array(list(by_word), np.intp), np.array(list(by_word.values()), np.intp)
        old = words[chosen, best[chosen]] & _STATE
        self._array[at] = tags[chosen] | old | _IS_STAGING
        return {keys[index]: word for word, index in by_word.items()}

    def _change(self, key: bytes, added: int, removed: int) -> int | None:
        """Set and clear bits of a chunk; which word they are in, if any."""
        near, far, tag = _place(key, self._mask)
        words, free = self._words, None
        for first in (near, far):
            bucket = words[first : first + BUCKET_WORDS].tolist()
            for at, word in enumerate(bucket, first):
                if 0 < word ^ tag <= _STATE_BITS:  # the same tag, and a state
                    bits = (word | added) & ~removed
                    words[at] = bits if bits & _STATE_BITS else 0
                    return at
                if not word and free is None:
                    free = at
        if added and free is not None and key not in self._left_out:
            words[free] = tag | added
            return free
        bits = (self._left_out.pop(key, 0) | added) & ~removed
        if bits:
            self._left_out[key] = bits
        words[_LEFT_OUT_WORD] = len(self._left_out)
        return None

    def close(self) -> None:
        """Give the memory back; readers that have it mapped keep what it was. Idempotent."""
        if self._fd >= 0:
            self._words.release()
            del self._array, self._buckets
            self._map.close()
            os.close(self._fd)
            self._fd = -1


class IndexObserver:
    """Keeps an index as a store's tiers change, then tells another observer.

    Args:
        index: that is kept.
        after: told the same.
    """

    def __init__(self, index: ResidenceIndex, after: StoreObserver) -> None:
        self._index = index
        self._after = after

    def staging(self, keys: Sequence[bytes]) -> None:
        self._index.stage(keys)

    def unstaged(self, key: bytes) -> None:
        self._index.unstage(key)

    def committed(self, chunks: Sequence[Chunk]) -> None:
        self._index.settle([chunk.key for chunk in chunks])
        self._after.stored(Tier.DRAM, chunks)

    def stored(self, tier: Tier, chunks: Sequence[Chunk]) -> None:
        for chunk in chunks:
            self._index.mark(chunk.key, Residence(tier.value))
        self._after.stored(tier, chunks)

    def removed(self, tier: Tier, keys: Sequence[bytes]) -> None:
        for key in keys:
            self._index.mark(key, Residence(tier.value), False)
        self._after.removed(tier, keys)


class ResidenceView:
    """A reader's side, in another process of the host; see ``open``."""

    def __init__(self, mapping: mmap.mmap, buckets: int) -> None:
        self._map = mapping
        self._header: Words = np.frombuffer(mapping, np.uint64, _HEADER.size // 8)
        flat: Words = np.frombuffer(mapping, np.uint64, offset=HEADER_BYTES)
        self._table = flat.reshape(buckets, BUCKET_WORDS)
        self._mask = np.uint64(buckets - 1)

    @classmethod
    def open(cls, info: IndexInfo, epoch: str) -> ResidenceView | None:
        """Map a store's index; None where it can't be reached: another host, container or user."""
        path = Path(info.path)
        with contextlib.suppress(OSError, ValueError):
            # on another host a process of that number has some other file there: not opened
            if path.parts[1:2] != ("proc",) or not os.readlink(path).startswith(f"/memfd:{NAME}"):
                return None
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
                    return None
                mapping = mmap.mmap(fd, info.nbytes, prot=mmap.PROT_READ)
            finally:
                os.close(fd)
            magic, found, buckets, _ = _HEADER.unpack_from(mapping)
            is_whole = info.nbytes == HEADER_BYTES + buckets * BUCKET_WORDS * 8
            if (magic, found) == (_MAGIC, epoch.encode()) and is_whole:
                return cls(mapping, buckets)
        return None

    def probe(self, keys: Sequence[bytes]) -> list[Residence] | None:
        """Where these are; None if only the store knows."""
        are_hashes = set(map(len, keys)) == {KEY_BYTES}
        joined = b"".join(keys if are_hashes else map(_digest, keys))
        pairs: Words = np.frombuffer(joined, np.uint64)
        low, tags = pairs[::2], (pairs[1::2] & _TAG)[:, None]
        near = self._table[low & self._mask]
        far = self._table[low >> _HALF & self._mask]
        words = np.concatenate((near, far), axis=1)
        bits = np.where(words & _TAG == tags, words & _STATE, _NONE).max(axis=1).tolist()
        if self._header[_LEFT_OUT_WORD] and 0 in bits:
            return None
        return [_RESIDENCE[state] for state in bits]


_TAG, _STATE = np.uint64(_TAG_BITS), np.uint64(_STATE_BITS)
_HALF, _NONE = np.uint64(32), np.uint64(0)
_ONE, _STATE_WIDTH = np.uint64(1), np.uint64(_STATE_BITS.bit_length())
_LAST_WORD = np.uint64(BUCKET_WORDS - 1)
_LIKING = np.array(
    [
        [
            BUCKET_WORDS * (2 - at // BUCKET_WORDS) - (at + turn) % BUCKET_WORDS
            for at in range(2 * BUCKET_WORDS)
        ]
        for turn in range(BUCKET_WORDS)
    ],
    np.int8,
)
"""By a key's turn: how much it likes each word of its near bucket, then of its far one."""
_IS_STAGING, _IS_DRAM = np.uint64(_STAGING), np.uint64(_DRAM)


def _digest(key: bytes) -> bytes:
    """KEY_BYTES bytes that are as good as random; keys of that length are hashes already."""
    if len(key) == KEY_BYTES:
        return key
    return hashlib.blake2b(key, digest_size=KEY_BYTES, person=b"kv-index").digest()


def _place(key: bytes, mask: int) -> tuple[int, int, int]:
    """The first words of both buckets, and the tag."""
    low, high = _PAIR.unpack(_digest(key))
    first = HEADER_BYTES // 8
    near, far = low & mask, low >> 32 & mask
    return first + near * BUCKET_WORDS, first + far * BUCKET_WORDS, high & _TAG_BITS
