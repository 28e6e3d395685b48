"""Computes the checksums of SSD record sections, and reads sections with their checksums.

Both are one call of compiled code for all sections, since every call into and out of C makes the
threads contend for Python's GIL."""

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
# Not drawn by numpy's generators, whose output may change between releases: records must stay
# readable. And drawn at import, not on first use with `lru_cache`: when several threads call it
# first, each draws its own array and one is kept. The others were freed while compiled code still
# used them, so that one of the first records of a process had checksums that never matched again.
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
    """Compute the 64-bit checksums of all sections, concatenated, at memory bandwidth.

    Each word is multiplied by an odd random weight, and each page by a power of an odd number,
    modulo 2**64 (multilinear hashing). Any change of a single word changes the sum; other changes
    go undetected with a probability of about 2**-60. It protects against faults of disks and
    kernels, not against attackers.

    Args:
        payload: the sections' bytes; whole pages.
        section: bytes per section, whole pages; the last section may be shorter.
    """
    compiled = _compiled()
    if compiled is None:
        return interpreted_checksums(payload, section)
    arguments, sums = _arguments(payload, section)
    compiled.checksums(*arguments)
    return bytes(sums)


def read_sections(file: int, offset: int, payload: memoryview, section: int) -> bytes:
    """Fill ``payload`` from a file; returns the checksums of its sections.

    Args:
        file: file descriptor.
        offset: where to start in the file.
        payload: the buffer to fill; whole pages.
        section: see ``section_checksums``.

    Raises:
        OSError: the read failed or was short.
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
        raise OSError(f"the read was short: {found} of {wanted} bytes")


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
    """The trailing arguments of both compiled functions, and separately the last of them: the
    output array for the checksums."""
    words: NDArray[np.uint64] = np.frombuffer(payload, np.uint64)
    sums = (ctypes.c_uint64 * -(-len(payload) // section))()
    pages = len(payload) // GRANULE
    return (words.ctypes.data, pages, section // GRANULE, _WEIGHTS_ADDRESS, sums), sums


class _Compiled(NamedTuple):
    """The compiled functions with their argument types set. They are kept here, because a second
    look-up in the library might return an object of another thread that has no types yet."""

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
