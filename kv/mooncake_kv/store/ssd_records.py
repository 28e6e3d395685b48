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

import struct
import zlib

import msgspec

from mooncake_kv.store.arena_allocator import GRANULE, rounded_up
from mooncake_kv.store.chunk_keys import KEY_VERSION
from mooncake_kv.store.chunk_store import Chunk, ChunkContent
from mooncake_kv.store.ssd_sections import section_checksums

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


def are_sections_right(header: RecordHeader, start: int, checksums: bytes) -> bool:
    """Whether a record's sections have these checksums, from the one at ``start`` on."""
    first = 8 * (start // section_bytes(header.nbytes))
    return checksums == header.checksums[first : first + len(checksums)]


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
