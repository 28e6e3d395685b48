"""The shared index: where a store's chunks are, in memory that other processes of its host map.
``StoreClient`` answers probes from it without a message.

The index is a hash table of 8-byte words in a memfd. A word has 61 bits of a chunk's key, and a bit
each for STAGING, DRAM and SSD. A key is in one of two buckets of eight words, one cache line each.
The store writes whole words, which is atomic, and never moves one. So a reader sees each chunk
either before or after a change, and needs neither a lock nor a retry. What it finds is a hint, as
with every probe: only ``pin`` is authoritative.

A key whose two buckets are full is left out, and counted in the header. While that count is not 0,
readers ask the store about keys that they did not find.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import mmap
import os
import struct
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from mooncake_hal import native
from mooncake_hal.errors import NativeUnavailable
from mooncake_kv.errors import KVConfigError
from mooncake_kv.store.chunk_keys import KEY_BYTES
from mooncake_kv.store.chunk_store import Chunk, IndexInfo, Residence, StoreObserver, Tier

NAME = "mooncake-kv-index"
HEADER_BYTES = 4096
BUCKET_WORDS = 8
BYTES_PER_CHUNK = 64 << 10
"""Chunk size for which the table is dimensioned, with twice as many words as such chunks fit into
the store. With larger chunks it is emptier."""
SMALL_BATCH_KEYS = 4
"""Batches of up to this many keys are updated in Python, which is faster than a call into C."""
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
"""The result of a probe by a word's state bits, as ``NodeStore.probe`` would return it."""

Words = npt.NDArray[np.uint64]


class ResidenceIndex:
    """The store's side of the index, and its only writer. Not thread-safe: ``NodeStore`` calls it
    with its lock held.

    Args:
        capacity_bytes: capacity of all tiers together.
        epoch: the store's epoch, 16 characters, which readers check.

    Raises:
        KVConfigError: the host lacks the memory for it.
    """

    def __init__(self, capacity_bytes: int, epoch: str) -> None:
        wanted = 2 * capacity_bytes // BYTES_PER_CHUNK // BUCKET_WORDS
        buckets = min(MAX_BUCKETS, max(MIN_BUCKETS, 1 << max(0, wanted - 1).bit_length()))
        self._mask = buckets - 1
        self._left_out: dict[bytes, int] = {}
        nbytes = HEADER_BYTES + buckets * BUCKET_WORDS * 8
        self._fd = os.memfd_create(NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self._fd, nbytes)
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
            self._map = mmap.mmap(self._fd, nbytes)
        except (OSError, ValueError) as exc:
            os.close(self._fd)
            raise KVConfigError(
                f"{nbytes} bytes for a store's index can't be mapped: {exc}"
            ) from exc
        _HEADER.pack_into(self._map, 0, _MAGIC, epoch.encode(), buckets, 0)
        self._words = memoryview(self._map).cast("Q")
        self._buckets: Words = np.frombuffer(self._map, np.uint64, offset=HEADER_BYTES)
        self.info = IndexInfo(f"/proc/{os.getpid()}/fd/{self._fd}", nbytes)

    def mark(self, keys: Sequence[bytes], where: Residence, is_there: bool = True) -> None:
        """Set or clear where chunks are."""
        self._change(keys, *((_BIT[where], 0) if is_there else (0, _BIT[where])))

    def stage(self, keys: Sequence[bytes]) -> None:
        """Chunks are being written to memory; ``settle`` or ``unstage`` follows for each."""
        self._change(keys, _STAGING, 0)

    def settle(self, keys: Sequence[bytes]) -> None:
        """The writes have been committed: the chunks are in memory."""
        self._change(keys, _DRAM, _STAGING)

    def unstage(self, key: bytes) -> None:
        """The write of a chunk has been aborted."""
        self._change([key], 0, _STAGING)

    def _change(self, keys: Sequence[bytes], added: int, removed: int) -> None:
        """Set and clear state bits of chunks."""
        helper = _compiled() if len(keys) > SMALL_BATCH_KEYS else None
        if helper is None or self._left_out:
            for key in keys:
                self._change_one(key, added, removed)
            return
        are_left_out = (ctypes.c_uint8 * len(keys))()
        buckets, joined = self._buckets.ctypes.data, _joined(keys)
        change = helper.mooncake_change
        if change(buckets, self._mask, joined, len(keys), added, removed, are_left_out):
            left_out = zip(keys, are_left_out, strict=True)
            self._left_out.update((key, added) for key, is_left_out in left_out if is_left_out)
            self._words[_LEFT_OUT_WORD] = len(self._left_out)

    def _change_one(self, key: bytes, added: int, removed: int) -> None:
        near, far, tag = _place(key, self._mask)
        words, free = self._words, None
        for first in (near, far):
            bucket = words[first : first + BUCKET_WORDS].tolist()
            for at, word in enumerate(bucket, first):
                if 0 < word ^ tag <= _STATE_BITS:  # the same tag, and a state
                    bits = (word | added) & ~removed
                    words[at] = bits if bits & _STATE_BITS else 0
                    return
                if not word and free is None:
                    free = at
        if added and free is not None and key not in self._left_out:
            words[free] = tag | added
            return
        bits = (self._left_out.pop(key, 0) | added) & ~removed
        if bits:
            self._left_out[key] = bits
        words[_LEFT_OUT_WORD] = len(self._left_out)

    def close(self) -> None:
        """Release the memory; readers that have it mapped keep its last state. Idempotent."""
        if self._fd >= 0:
            self._words.release()
            del self._buckets
            self._map.close()
            os.close(self._fd)
            self._fd = -1


class IndexObserver:
    """A ``TableObserver`` that updates the index, then forwards the notification.

    Args:
        index: the index to update.
        after: the observer that is notified next.
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
        self._index.mark([chunk.key for chunk in chunks], Residence(tier.value))
        self._after.stored(tier, chunks)

    def removed(self, tier: Tier, keys: Sequence[bytes]) -> None:
        self._index.mark(keys, Residence(tier.value), False)
        self._after.removed(tier, keys)


class ResidenceView:
    """The reader's side of the index, in another process of the host; created by ``open``."""

    def __init__(self, mapping: mmap.mmap, buckets: int) -> None:
        self._map = mapping
        self._header: Words = np.frombuffer(mapping, np.uint64, _HEADER.size // 8)
        flat: Words = np.frombuffer(mapping, np.uint64, offset=HEADER_BYTES)
        self._table = flat.reshape(buckets, BUCKET_WORDS)
        self._address = self._table.ctypes.data
        self._mask = buckets - 1
        self._helper = _compiled()

    @classmethod
    def open(cls, info: IndexInfo, epoch: str) -> ResidenceView | None:
        """Map a store's index; None where it can't be reached: another host, container or user."""
        path = Path(info.path)
        with contextlib.suppress(OSError, ValueError):
            # on another host, a process with the same pid has another file there: don't open it
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
        """Look chunks up; None if only the store can answer, because keys were left out."""
        bits = self._bits(_joined(keys), len(keys))
        if self._header[_LEFT_OUT_WORD] and 0 in bits:
            return None
        return [_RESIDENCE[state] for state in bits]

    def _bits(self, joined: bytes, count: int) -> Sequence[int]:
        """The state bits of each chunk; 0 for a chunk that is not in the index."""
        if self._helper is not None:
            states = (ctypes.c_uint8 * count)()
            self._helper.mooncake_probe(self._address, self._mask, joined, count, states)
            return bytes(states)
        pairs: Words = np.frombuffer(joined, np.uint64)
        low, tags = pairs[::2], (pairs[1::2] & _TAG)[:, None]
        mask = np.uint64(self._mask)
        near, far = self._table[low & mask], self._table[low >> _HALF & mask]
        words = np.concatenate((near, far), axis=1)
        found: list[int] = (
            np.where(words & _TAG == tags, words & _STATE, _NONE).max(axis=1).tolist()
        )
        return found


_TAG, _STATE = np.uint64(_TAG_BITS), np.uint64(_STATE_BITS)
_HALF, _NONE = np.uint64(32), np.uint64(0)
_SOURCE = """
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#define BUCKET_WORDS 8
#define STATE_BITS 7ull
/* Both buckets of a key of 16 bytes; returns its tag. */
static uint64_t place(const char *key, uint64_t mask, uint64_t places[2]) {
    uint64_t pair[2];
    memcpy(pair, key, 16);
    places[0] = pair[0] & mask;
    places[1] = pair[0] >> 32 & mask;
    return pair[1] & ~STATE_BITS;
}
/* ``ResidenceIndex._change_one`` for many keys of 16 bytes; returns how many were left out. */
size_t mooncake_change(uint64_t *buckets, uint64_t mask, const char *keys, size_t count,
                       uint64_t added, uint64_t removed, uint8_t *are_left_out) {
    size_t num_left_out = 0;
    for (size_t i = 0; i < count; i++) {
        uint64_t *its = NULL, *unused = NULL, places[2];
        uint64_t tag = place(keys + 16 * i, mask, places);
        for (int near_or_far = 0; near_or_far < 2 && !its; near_or_far++) {
            uint64_t *bucket = buckets + places[near_or_far] * BUCKET_WORDS;
            for (int at = 0; at < BUCKET_WORDS && !its; at++) {
                if ((bucket[at] ^ tag) - 1 < STATE_BITS) its = bucket + at;
                if (!bucket[at] && !unused) unused = bucket + at;
            }
        }
        uint64_t word = its ? (*its | added) & ~removed : tag | added;
        if (!its && added) its = unused;
        if (its) {
            __atomic_store_n(its, word & STATE_BITS ? word : 0, __ATOMIC_RELEASE);
        } else if (added) {
            are_left_out[i] = 1;
            num_left_out++;
        }
    }
    return num_left_out;
}
/* ``ResidenceView.probe`` of many keys of 16 bytes: the state bits of each. */
void mooncake_probe(const uint64_t *buckets, uint64_t mask, const char *keys, size_t count,
                    uint8_t *states) {
    for (size_t i = 0; i < count; i++) {
        uint64_t places[2], tag = place(keys + 16 * i, mask, places);
        for (int near_or_far = 0; near_or_far < 2; near_or_far++) {
            const uint64_t *bucket = buckets + places[near_or_far] * BUCKET_WORDS;
            for (int at = 0; at < BUCKET_WORDS; at++) {
                uint64_t word = __atomic_load_n(bucket + at, __ATOMIC_ACQUIRE);
                if ((word & ~STATE_BITS) == tag && (word & STATE_BITS) > states[i])
                    states[i] = word & STATE_BITS;
            }
        }
    }
}
"""


@lru_cache(maxsize=1)
def _compiled() -> ctypes.CDLL | None:
    try:
        helper = native.compile_c("kv_index", _SOURCE)
    except NativeUnavailable as exc:
        native.warn_fallback("kv_index", "Python and numpy", exc.reason)
        return None
    pointer, number = ctypes.c_void_p, ctypes.c_uint64
    size = ctypes.c_size_t
    keys = ctypes.c_char_p
    helper.mooncake_change.argtypes = [pointer, number, keys, size, number, number, pointer]
    helper.mooncake_change.restype = size
    helper.mooncake_probe.argtypes = [pointer, number, keys, size, pointer]
    helper.mooncake_probe.restype = None
    return helper


def _joined(keys: Sequence[bytes]) -> bytes:
    """The digests of all keys, concatenated."""
    are_hashes = set(map(len, keys)) == {KEY_BYTES}
    return b"".join(keys if are_hashes else map(_digest, keys))


def _digest(key: bytes) -> bytes:
    """KEY_BYTES pseudo-random bytes of a key; a key of that length is a hash already."""
    if len(key) == KEY_BYTES:
        return key
    return hashlib.blake2b(key, digest_size=KEY_BYTES, person=b"kv-index").digest()


def _place(key: bytes, mask: int) -> tuple[int, int, int]:
    """A key's position: the first words of its two buckets, and its tag."""
    low, high = _PAIR.unpack(_digest(key))
    first = HEADER_BYTES // 8
    near, far = low & mask, low >> 32 & mask
    return first + near * BUCKET_WORDS, first + far * BUCKET_WORDS, high & _TAG_BITS
