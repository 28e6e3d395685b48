"""Records of chunks on an SSD: a page that says what follows, and the chunk's bytes. Pure.

    page 0 of a segment    magic, checksum, length, SegmentHeader
    a record               magic, checksum, length, RecordHeader | padding to a page | the bytes,
                           in sections, padded to a page

A record names the use of the segment that it was written in. Segments are written again from the
start when they are recycled: what lies behind the last new record is of another use, and ends the
scan. Each section of a record has a checksum of its own, so that a chunk is read layer by layer:
what was read counts only if its checksums are right, each time it is read.
"""

from __future__ import annotations

import ctypes
import hashlib
import struct
import zlib
from functools import lru_cache

import msgspec
import numpy as np
from numpy.typing import NDArray

from mooncake_hal import native
from mooncake_hal.errors import NativeUnavailable
from mooncake_kv.store.arena_allocator import GRANULE, rounded_up
from mooncake_kv.store.chunk_keys import KEY_VERSION
from mooncake_kv.store.chunk_store import Chunk, ChunkContent

PAGE = GRANULE
RECORD_VERSION = 2
"""Of what this module writes. Version 1 had one checksum for all bytes of a record."""
MIN_SECTION_BYTES = 64 << 10
"""A request for fewer bytes hardly costs a drive less."""
MIN_PART_BYTES = 256 << 10
"""Of a record's parts behind the first ones, which steps wait for."""
MAX_SECTIONS = 128
"""Their checksums fit into a record's page."""
MAX_CONTENT_BYTES = 2048
"""Of tokens, in a record's page beside checksums and tenant; of larger chunks it does not say them,
and after a restart their KV events don't."""
MAX_PARTS = 32
"""That a record is read in: with more there is little to hide, and each costs a request."""
_MAGIC = b"mcakekv1"
_PREFIX = struct.Struct("<8sII")  # magic, crc32 of the body, length of the body


class SegmentHeader(msgspec.Struct, frozen=True, array_like=True, tag="segment"):
    """What a segment is.

    Args:
        use: random, drawn each time that the segment is written from its start.
        sequence: how many segments had been begun before, in this directory.
        version: of keys and layout.
        records: RECORD_VERSION of what follows; what does not say it is of version 1.
    """

    use: bytes
    sequence: int
    version: int = KEY_VERSION
    records: int = 1


class RecordHeader(msgspec.Struct, frozen=True, array_like=True, tag="record"):
    """What a record is; fields as in ``Chunk``. One with an empty key is void.

    Args:
        use: of the segment, when it was written.
        checksums: of each section, with its padding, 8 bytes each; see ``section_checksums``.
    """

    use: bytes
    checksums: bytes
    key: bytes
    parent: bytes | None
    position: int
    nbytes: int
    num_tokens: int
    tenant: str
    content: ChunkContent | None = None

    def chunk(self) -> Chunk:
        """What is stored."""
        return Chunk(
            self.key,
            self.parent,
            self.position,
            self.nbytes,
            self.num_tokens,
            self.tenant,
            self.content,
        )


Header = SegmentHeader | RecordHeader
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Header] = msgspec.msgpack.Decoder(Header)


def record_bytes(nbytes: int) -> int:
    """What a chunk of that many bytes takes on an SSD."""
    return PAGE + rounded_up(nbytes)


def section_bytes(nbytes: int) -> int:
    """What each section of a chunk of that many bytes has, but the last one, which may have less.
    Whole pages."""
    return max(MIN_SECTION_BYTES, rounded_up(-(-nbytes // MAX_SECTIONS)))


def parts_to_read(nbytes: int, first_bytes: int | None) -> list[tuple[int, int]]:
    """Ranges of a chunk's bytes, in the order in which they are read; whole sections. Behind the
    first one each has as many bytes as there are before it, up to MIN_PART_BYTES: a model with
    small layers computes the first ones while no more than the next ones are read.

    Args:
        nbytes: of the chunk.
        first_bytes: the first range has at least these, and few more; None: all is one range.
    """
    section, end = section_bytes(nbytes), rounded_up(nbytes)
    if first_bytes is None:
        return [(0, end)]
    size = section * -(-max(MIN_PART_BYTES, -(-end // (MAX_PARTS - 1))) // section)
    stop = min(max(-(-first_bytes // section), 1) * section, end)
    parts = [(0, stop)]
    while stop < end:
        start, stop = stop, min(stop + min(stop, size), end)
        parts.append((start, stop))
    return parts


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
    words: NDArray[np.uint64] = np.frombuffer(payload, np.uint64)
    sums = np.empty(-(-len(payload) // section), np.uint64)
    pages = len(payload) // PAGE
    compiled(
        words.ctypes.data, pages, section // PAGE, _weights().ctypes.data, sums.ctypes.data
    )  # one call for all of them: threads take turns at Python's lock around each
    return sums.tobytes()


def are_sections_right(header: RecordHeader, start: int, payload: memoryview) -> bool:
    """Whether these are a record's bytes, from ``start`` on; whole sections."""
    section = section_bytes(header.nbytes)
    first, count = start // section, -(-len(payload) // section)
    wanted = header.checksums[8 * first : 8 * (first + count)]
    return section_checksums(payload, section) == wanted


def record_header(chunk: Chunk, use: bytes, payload: memoryview) -> RecordHeader:
    """The header of a chunk's record.

    Args:
        chunk: what it is.
        use: of the segment that it goes to.
        payload: its bytes, padded to whole pages.
    """
    content = chunk.content
    if content is not None and len(content.token_ids) > MAX_CONTENT_BYTES:
        content = None
    return RecordHeader(
        use,
        section_checksums(payload, section_bytes(chunk.nbytes)),
        chunk.key,
        chunk.parent,
        chunk.position,
        chunk.nbytes,
        chunk.num_tokens,
        chunk.tenant,
        content,
    )


def fill_page(page: memoryview, header: Header) -> None:
    """Write a header into a page.

    Raises:
        ValueError: it does not fit, since a tenant's name is too long.
    """
    body = _encoder.encode(header)
    if _PREFIX.size + len(body) > PAGE:
        raise ValueError(f"a header of {len(body)} bytes is longer than a page")
    _PREFIX.pack_into(page, 0, _MAGIC, zlib.crc32(body), len(body))
    page[_PREFIX.size : _PREFIX.size + len(body)] = body


def read_page(page: memoryview) -> Header | None:
    """The header in a page; None if it is none, or torn."""
    magic, crc, length = _PREFIX.unpack_from(page)
    body = bytes(page[_PREFIX.size : _PREFIX.size + length]) if magic == _MAGIC else b""
    if not body or len(body) != length or zlib.crc32(body) != crc:
        return None
    try:
        return _decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


_WORDS = PAGE // 8
_STEP = 0x9E3779B97F4A7C15  # odd: the golden ratio, 64 bits of it

_SOURCE = """
#include <stdint.h>
#include <stddef.h>
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
"""


def interpreted_checksums(payload: memoryview, section: int) -> bytes:
    """``section_checksums`` without compiled code."""
    words: NDArray[np.uint64] = np.frombuffer(payload, np.uint64)
    page_sums = (words.reshape(-1, _WORDS) @ _weights()).tolist()
    totals = []
    for first in range(0, len(page_sums), section // PAGE):
        total = 0
        for page_sum in page_sums[first : first + section // PAGE]:
            total = (total * _STEP + page_sum) & 0xFFFFFFFFFFFFFFFF
        totals.append(total.to_bytes(8, "little"))
    return b"".join(totals)


@lru_cache(maxsize=1)
def _weights() -> NDArray[np.uint64]:
    # not numpy's generators: what one release wrote, the next one reads
    drawn = np.frombuffer(hashlib.shake_256(b"mooncake-kv").digest(PAGE), "<u8")
    return drawn.astype(np.uint64) | np.uint64(1)


@lru_cache(maxsize=1)
def _compiled() -> ctypes._NamedFuncPointer | None:
    try:
        function = native.compile_c("kv_checksum", _SOURCE).mooncake_checksums
    except NativeUnavailable as exc:
        native.warn_fallback("kv_checksum", "numpy's integer products", exc.reason)
        return None
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    function.argtypes = [pointer, size, size, pointer, pointer]
    function.restype = None
    return function
