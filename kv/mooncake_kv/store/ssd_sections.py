"""Checksums of the sections of records on an SSD, and reading sections with them: in compiled code,
one call for all, since threads take turns at Python's lock around each."""

from __future__ import annotations

import ctypes
import hashlib
import os
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mooncake_hal import native
from mooncake_hal.errors import NativeUnavailable
from mooncake_kv.store.arena_allocator import GRANULE

_WORDS = GRANULE // 8
_STEP = 0x9E3779B97F4A7C15  # odd: the golden ratio, 64 bits of it
# Not drawn by numpy's generators: what one release wrote, the next one reads. And drawn here, not
# at first use: `lru_cache` has each of several threads that come first draw its own, and keeps one.
# The others' memory was given back while compiled code still counted with it, and one of the first
# records of a process had checksums that were never found again.
_DRAWN = np.frombuffer(hashlib.shake_256(b"mooncake-kv").digest(GRANULE), "<u8")
_WEIGHTS: NDArray[np.uint64] = _DRAWN.astype(np.uint64) | np.uint64(1)
_WEIGHTS_ADDRESS = _WEIGHTS.ctypes.data

_SOURCE = """
#define _GNU_SOURCE
#include <errno.h>
#include <stddef.h>
#include <stdint.h>
#include <unistd.h>

void mooncake_checksums(const uint64_t *data, size_t pages, size_t pages_per_section,
                        const uint64_t *weights, uint64_t *sums) {
    uint64_t total = 0;
    for (size_t page = 0; page < pages; page++, data += 512) {
        uint64_t sum = 0;
        for (int i = 0; i < 512; i++) sum += data[i] * weights[i];
        total = total * 0x9E3779B97F4A7C15ull + sum;
        if ((page + 1) % pages_per_section == 0 || page + 1 == pages) {
            *sums++ = total;
            total = 0;
        }
    }
}

/* The bytes that were read, fewer at the end of the file, and then without checksums; -errno. */
int64_t mooncake_read_sections(int file, uint64_t offset, char *to, size_t pages,
                               size_t pages_per_section, const uint64_t *weights, uint64_t *sums) {
    size_t done = 0, nbytes = pages * 4096;
    while (done < nbytes) {
        ssize_t found = pread(file, to + done, nbytes - done, offset + done);
        if (found < 0 && errno == EINTR) continue;
        if (found < 0) return -errno;
        if (!found) return done;
        done += found;
    }
    mooncake_checksums((const uint64_t *)to, pages, pages_per_section, weights, sums);
    return done;
}
"""


def section_checksums(payload: memoryview, section: int) -> bytes:
    """The checksums of sections of that many bytes, one behind the other, at the speed of memory.

    Each is of 64 bits. Each word counts with an odd random weight, and each page with a power of an
    odd number, modulo 2**64 (multilinear hashing): any change of one word changes the sum, and
    others go unnoticed with a chance of about 2**-60. It guards against what disks and kernels do,
    not against enemies.

    Args:
        payload: whole pages.
        section: whole pages; the last section may have fewer.
    """
    compiled = _compiled()
    if compiled is None:
        return interpreted_checksums(payload, section)
    arguments, sums = _arguments(payload, section)
    compiled.checksums(*arguments)
    return bytes(sums)


def read_sections(file: int, offset: int, payload: memoryview, section: int) -> bytes:
    """Fill ``payload`` from a file; returns the checksums of what was read.

    Args:
        file: descriptor.
        offset: in the file.
        payload: whole pages.
        section: see ``section_checksums``.

    Raises:
        OSError: not all of it can be read.
    """
    compiled = _compiled()
    if compiled is None:
        _check(os.preadv(file, [payload], offset), len(payload))
        return interpreted_checksums(payload, section)
    arguments, sums = _arguments(payload, section)
    _check(compiled.read_sections(file, offset, *arguments), len(payload))
    return bytes(sums)


def _check(found: int, wanted: int) -> None:
    if found < 0:
        raise OSError(-found, os.strerror(-found))
    if found != wanted:
        raise OSError(f"{found} of {wanted} bytes are there to be read")


def interpreted_checksums(payload: memoryview, section: int) -> bytes:
    """``section_checksums`` without compiled code."""
    words: NDArray[np.uint64] = np.frombuffer(payload, np.uint64)
    page_sums = (words.reshape(-1, _WORDS) @ _WEIGHTS).tolist()
    totals = []
    for first in range(0, len(page_sums), section // GRANULE):
        total = 0
        for page_sum in page_sums[first : first + section // GRANULE]:
            total = (total * _STEP + page_sum) & 0xFFFFFFFFFFFFFFFF
        totals.append(total.to_bytes(8, "little"))
    return b"".join(totals)


def _arguments(
    payload: memoryview, section: int
) -> tuple[tuple[int, int, int, int, ctypes.Array[ctypes.c_uint64]], ctypes.Array[ctypes.c_uint64]]:
    """What both compiled functions take at their end, and the last of it: room for the sums."""
    words: NDArray[np.uint64] = np.frombuffer(payload, np.uint64)
    sums = (ctypes.c_uint64 * -(-len(payload) // section))()
    pages = len(payload) // GRANULE
    return (words.ctypes.data, pages, section // GRANULE, _WEIGHTS_ADDRESS, sums), sums


class _Compiled(NamedTuple):
    """The compiled functions, each with its types: looked up once more in the library, one may be
    an object of another thread that has none yet."""

    checksums: Callable[..., None]
    read_sections: Callable[..., int]


@lru_cache(maxsize=1)
def _compiled() -> _Compiled | None:
    try:
        library = native.compile_c("kv_sections", _SOURCE)
    except NativeUnavailable as exc:
        native.warn_fallback("kv_sections", "numpy's integer products", exc.reason)
        return None
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    checksums, read_sections = library.mooncake_checksums, library.mooncake_read_sections
    checksums.argtypes = [pointer, size, size, pointer, pointer]
    checksums.restype = None
    read_sections.argtypes = [ctypes.c_int, ctypes.c_uint64, *checksums.argtypes]
    read_sections.restype = ctypes.c_int64
    return _Compiled(checksums, read_sections)
