"""The format of SSD segments: records of a header page and a chunk's bytes. Pure.

    page 0 of a segment    magic, checksum, length, SegmentHeader
    a record               magic, checksum, length, RecordHeader | padding to a page | the bytes,
                           in sections, padded to a page

A record carries the id of the segment use in which it was written. A recycled segment is
overwritten from its start, so the records after the newest one carry the id of a former use, which
ends the scan. Each section of a record has its own checksum, so that a chunk can be read and
verified layer by layer. The checksums are verified on every read.
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
"""Version of the record format. Version 1 had one checksum for all bytes of a record."""
MIN_SECTION_BYTES = 64 << 10
"""Lower bound of a section: a smaller request takes a drive hardly less time."""
MIN_PART_BYTES = 256 << 10
"""Size up to which the parts of a read grow. Only the first parts, for which steps wait, are
smaller."""
MAX_SECTIONS = 128
"""Upper bound of the sections of a record, so that their checksums fit into its header page."""
MAX_CONTENT_BYTES = 2048
"""Upper bound of the tokens stored in a header page, next to checksums and tenant. The tokens of
larger chunks are left out, so that their KV events after a restart have none."""
MAX_PARTS = 32
"""Upper bound of the parts in which a record is read: more would hide hardly more loading time, and
each part is a request to the drive."""
_MAGIC = b"mcakekv1"
_PREFIX = struct.Struct("<8sII")  # magic, crc32 of the body, length of the body


class SegmentHeader(msgspec.Struct, frozen=True, array_like=True, tag="segment"):
    """The header of a segment.

    Args:
        use: random id of this use, drawn each time the segment is overwritten from its start.
        sequence: number of segment uses started before this one in the directory.
        version: KEY_VERSION of its chunks' keys and layout.
        records: RECORD_VERSION of its records; segments without this field have version 1.
    """

    use: bytes
    sequence: int
    version: int = KEY_VERSION
    records: int = 1


class RecordHeader(msgspec.Struct, frozen=True, array_like=True, tag="record"):
    """The header of a record; other fields as in ``Chunk``. A record with an empty key is void.

    Args:
        use: id of the segment's use in which the record was written.
        checksums: checksum of each section with its padding, 8 bytes each; see
            ``section_checksums``.
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
        """The stored chunk's description."""
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
    """Bytes on an SSD of a chunk of ``nbytes`` bytes."""
    return PAGE + rounded_up(nbytes)


def section_bytes(nbytes: int) -> int:
    """Bytes per section of a chunk of ``nbytes`` bytes, in whole pages; the last section may be
    shorter."""
    return max(MIN_SECTION_BYTES, rounded_up(-(-nbytes // MAX_SECTIONS)))


def parts_to_read(nbytes: int, first_bytes: int | None) -> list[tuple[int, int]]:
    """Split a chunk's bytes into the ranges in which they are read, of whole sections.

    Each range after the first one is as long as all ranges before it, up to MIN_PART_BYTES (or
    1 / MAX_PARTS of the chunk, if that is more). So a model with small layers can compute the first
    layers while only the next ones are read.

    Args:
        nbytes: size of the chunk.
        first_bytes: length of the first range, rounded up to sections; None for a single range.
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


def do_checksums_match(header: RecordHeader, start: int, checksums: bytes) -> bool:
    """Whether these are the checksums of a record's sections from byte ``start`` on."""
    first = 8 * (start // section_bytes(header.nbytes))
    return checksums == header.checksums[first : first + len(checksums)]


def record_header(chunk: Chunk, use: bytes, payload: memoryview) -> RecordHeader:
    """Create the header of a chunk's record.

    Args:
        chunk: the chunk's description.
        use: id of the current use of the target segment.
        payload: the chunk's bytes, padded to whole pages.
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
        ValueError: the header does not fit into a page, because a tenant's name is too long.
    """
    body = _encoder.encode(header)
    if _PREFIX.size + len(body) > PAGE:
        raise ValueError(f"a header of {len(body)} bytes does not fit into a page of {PAGE}")
    _PREFIX.pack_into(page, 0, _MAGIC, zlib.crc32(body), len(body))
    page[_PREFIX.size : _PREFIX.size + len(body)] = body


def read_page(page: memoryview) -> Header | None:
    """Decode the header in a page; None if the page has none, or a torn one."""
    magic, crc, length = _PREFIX.unpack_from(page)
    body = bytes(page[_PREFIX.size : _PREFIX.size + length]) if magic == _MAGIC else b""
    if not body or len(body) != length or zlib.crc32(body) != crc:
        return None
    try:
        return _decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
