"""Operations on spans: dividing them over connections, cutting them into pieces of bounded length,
and copying many pieces with one system call."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mooncake_hal.transport import Spans

U64 = NDArray[np.uint64]

ALIGNMENT = 4096
"""Spans are divided at multiples of this many bytes, counted over all spans."""


class Pieces(NamedTuple):
    """Spans cut to at most a given length: four arrays of equal length.

    Args:
        local, remote, nbytes: as in ``Spans``.
        span: [n] index of the span that each piece is part of.
    """

    local: U64
    remote: U64
    nbytes: U64
    span: NDArray[np.intp]


def split_spans(spans: Spans, parts: int) -> list[Spans]:
    """Divide spans into up to ``parts`` shares of nearly equal size, in order.

    A span across a cut is divided over both shares. No share is empty.
    """
    ends = np.cumsum(spans.nbytes)
    total = int(ends[-1])
    cuts = [total * part // parts // ALIGNMENT * ALIGNMENT for part in range(1, parts)]
    edges = sorted({0, *cuts, total})
    return [_between(spans, ends, low, high) for low, high in pairwise(edges)]


def limit_spans(spans: Spans, max_count: int) -> list[Spans]:
    """Divide spans into groups of at most ``max_count`` spans."""
    if len(spans) <= max_count:
        return [spans]
    return [
        Spans(
            spans.local[at : at + max_count],
            spans.remote[at : at + max_count],
            spans.nbytes[at : at + max_count],
        )
        for at in range(0, len(spans), max_count)
    ]


def cut(local: U64, remote: U64, nbytes: U64, limit: int) -> Pieces:
    """Cut spans into pieces of at most ``limit`` bytes, in order; all arrays are [n]."""
    size = np.uint64(limit)
    if int(nbytes.max(initial=0)) <= limit:
        return Pieces(local, remote, nbytes, np.arange(len(nbytes)))
    counts = ((nbytes + (size - np.uint64(1))) // size).astype(np.intp)
    span = np.repeat(np.arange(len(nbytes)), counts)
    firsts = np.cumsum(counts) - counts
    offset = (np.arange(len(span)) - firsts[span]).astype(np.uint64) * size
    return Pieces(
        local[span] + offset,
        remote[span] + offset,
        np.minimum(nbytes[span] - offset, size),
        span,
    )


def _between(spans: Spans, ends: np.ndarray, low: int, high: int) -> Spans:
    first = int(np.searchsorted(ends, low, side="right"))
    last = int(np.searchsorted(ends, high, side="left"))
    local, remote, nbytes = (
        array[first : last + 1].copy() for array in (spans.local, spans.remote, spans.nbytes)
    )
    skipped = np.uint64(low - (int(ends[first]) - int(nbytes[0])))
    nbytes[-1] -= np.uint64(int(ends[last]) - high)
    local[0] += skipped
    remote[0] += skipped
    nbytes[0] -= skipped
    return Spans(local, remote, nbytes)


IOV_MAX = 1024

_libc = ctypes.CDLL(None, use_errno=True)
_pointer, _count = ctypes.c_void_p, ctypes.c_ulong
for _call in (_libc.process_vm_readv, _libc.process_vm_writev):
    _call.argtypes = [ctypes.c_int, _pointer, _count, _pointer, _count, _count]
    _call.restype = ctypes.c_ssize_t


def vectors(
    addresses: NDArray[np.uint64],  # [n]
    nbytes: NDArray[np.uint64],  # [n]
    max_bytes: int,
) -> Iterator[NDArray[np.uint64]]:
    """Yield arrays of struct iovec, [k, 2], of at most ``max_bytes`` bytes and IOV_MAX pieces each.

    Together they cover every piece, in order; a piece that does not fit into a vector is cut.
    """
    first, offset = 0, 0
    while first < len(nbytes):
        sizes = nbytes[first : first + IOV_MAX].copy()
        sizes[0] -= np.uint64(offset)
        ends = np.cumsum(sizes)
        count = min(int(np.searchsorted(ends, max_bytes, side="left")) + 1, len(sizes))
        beyond = max(int(ends[count - 1]) - max_bytes, 0)
        sizes = sizes[:count]
        sizes[-1] -= np.uint64(beyond)
        vector = np.stack([addresses[first : first + count], sizes], axis=1)
        vector[0, 0] += np.uint64(offset)
        if beyond:
            offset = int(nbytes[first + count - 1]) - beyond
            first += count - 1
        else:
            first, offset = first + count, 0
        yield vector


def gather(vector: NDArray[np.uint64], target: NDArray[np.uint8]) -> None:
    """Copy pieces to the beginning of ``target``. Raises OSError, such as EFAULT."""
    _require(call_vectors(os.getpid(), 0, _one(vector, target), vector))


def scatter(source: NDArray[np.uint8], vector: NDArray[np.uint64]) -> None:
    """Copy the beginning of ``source`` to pieces. Raises OSError, such as EFAULT."""
    _require(call_vectors(os.getpid(), 1, _one(vector, source), vector))


def call_vectors(
    pid: int,
    write: int,
    local: NDArray[np.uint64],  # [n, 2], a struct iovec per row, in this process
    remote: NDArray[np.uint64],  # [m, 2], in process `pid`
) -> int:
    """Call process_vm_readv or process_vm_writev; returns 0 or an errno."""
    call = _libc.process_vm_writev if write else _libc.process_vm_readv
    moved = call(pid, local.ctypes.data, len(local), remote.ctypes.data, len(remote), 0)
    if moved < 0:
        return ctypes.get_errno()
    return 0 if moved == int(local[:, 1].sum()) else errno.EFAULT


def _one(vector: NDArray[np.uint64], flat: NDArray[np.uint8]) -> NDArray[np.uint64]:
    """Return an iovec for the beginning of ``flat``, as long as all pieces of ``vector``."""
    return np.array([[flat.ctypes.data, int(vector[:, 1].sum())]], np.uint64)


def _require(failed: int) -> None:
    if failed:
        raise OSError(failed, os.strerror(failed))
