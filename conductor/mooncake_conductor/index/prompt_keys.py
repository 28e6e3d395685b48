"""Chunk keys of prompts, which the chunk index uses.

    link_i = BLAKE2b(link_{i-1}, 16 tokens), 64 bits; link_0 from adapter and cache salt

Every fourth link is the key of a chunk of 64 tokens. The keys are the conductor's own: each
publisher hashes its blocks in its own way, but all publish the tokens, and blocks of any multiple
of 16 tokens end at a link. A collision causes a worse choice, never a wrong answer.

A prompt whose tokens are not known exactly, such as a text or a chat before its template, has keys
of another range: no published block can have them.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

LINK_TOKENS = 16
LINKS_PER_CHUNK = 4
CHUNK_TOKENS = LINK_TOKENS * LINKS_PER_CHUNK
BYTES_PER_TOKEN = 4
MAX_CHUNKS = 4096
"""Bound of the keys of a prompt, 256 Ki tokens; the rest of a longer prompt has no keys."""
_UNPUBLISHED = 1 << 63
"""Set in all keys that no published block can have."""
_KEY_BYTES = 8
_LINK_BYTES = 8 * LINK_TOKENS
Keys = tuple[int, ...]


def chain_root(adapter: str = "", cache_salt: str = "") -> bytes:
    """The root of a prompt's chain. Adapters and tenants don't share KV, so their roots differ."""
    if not adapter and not cache_salt:
        return bytes(_KEY_BYTES)
    data = f"{adapter}\0{cache_salt}".encode("utf-8", "replace")
    return blake2b(data, digest_size=_KEY_BYTES, person=b"root").digest()


def extend_links(parent: bytes, token_ids: Sequence[int]) -> list[bytes]:
    """The links of tokens that follow ``parent``. A partial link at the end is left out.

    Raises:
        ValueError: a token id is not an integer from 0 to 2**64 - 1.
    """
    try:
        data = array("Q", token_ids).tobytes()
    except (OverflowError, TypeError) as exc:
        raise ValueError(f"token ids are numbers from 0 on: {exc}") from exc
    links = []
    for start in range(0, len(data) - _LINK_BYTES + 1, _LINK_BYTES):
        piece = parent + data[start : start + _LINK_BYTES]
        parent = blake2b(piece, digest_size=_KEY_BYTES, person=b"tokens").digest()
        links.append(parent)
    return links


def token_keys(
    token_ids: Sequence[int], root: bytes = bytes(_KEY_BYTES), *, is_exact: bool = True
) -> Keys:
    """Keys of all full chunks of a prompt; empty if a token id is invalid.

    Args:
        token_ids: the tokens of the prompt.
        root: root of its chain.
        is_exact: instances compute exactly these tokens, without a chat template for example.
    """
    try:
        links = extend_links(root, token_ids[: MAX_CHUNKS * CHUNK_TOKENS])
    except ValueError:
        return ()
    mark = 0 if is_exact else _UNPUBLISHED
    return tuple(key_of(link) | mark for link in links[LINKS_PER_CHUNK - 1 :: LINKS_PER_CHUNK])


def text_keys(prompt: bytes, root: bytes = bytes(_KEY_BYTES)) -> Keys:
    """Keys of a text whose tokens are unknown, in chunks of about CHUNK_TOKENS tokens."""
    keys, width = [], CHUNK_TOKENS * BYTES_PER_TOKEN
    for start in range(0, min(len(prompt), MAX_CHUNKS * width) - width + 1, width):
        piece = root + prompt[start : start + width]
        root = blake2b(piece, digest_size=_KEY_BYTES, person=b"text").digest()
        keys.append(key_of(root) | _UNPUBLISHED)
    return tuple(keys)


def key_of(link: bytes) -> int:
    """A link as the key of a published chunk."""
    return int.from_bytes(link, "big") >> 1


def are_published(keys: Sequence[int]) -> bool:
    """Whether publishers publish the chunks with these keys of one prompt."""
    return not keys or keys[0] < _UNPUBLISHED
