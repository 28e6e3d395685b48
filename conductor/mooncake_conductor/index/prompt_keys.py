"""Keys of a prompt's chunks: what the index is asked for, and filled with.

    link_i = BLAKE2b(link_{i-1}, 16 tokens), 64 bits; link_0 from adapter and cache salt

Every fourth link is the key of a chunk of 64 tokens. They are the conductor's own: publishers name
their blocks each in its own way, but they publish the tokens, and blocks of any multiple of 16
tokens end at a link. A collision costs one worse choice, never a wrong answer.
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
"""Of a longer prompt the rest has no keys: 256 Ki tokens."""
_KEY_BYTES = 8
_LINK_BYTES = 8 * LINK_TOKENS
Keys = tuple[int, ...]


def chain_root(adapter: str = "", cache_salt: str = "") -> bytes:
    """What a prompt's first tokens are chained to: KV of another adapter or tenant is another's."""
    if not adapter and not cache_salt:
        return bytes(_KEY_BYTES)
    data = f"{adapter}\0{cache_salt}".encode("utf-8", "replace")
    return blake2b(data, digest_size=_KEY_BYTES, person=b"root").digest()


def extend_links(parent: bytes, token_ids: Sequence[int]) -> list[bytes]:
    """The links of tokens that follow ``parent``; what is left over at their end has none.

    Raises:
        ValueError: an id is no number from 0 to 2**64.
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


def token_keys(token_ids: Sequence[int], root: bytes = bytes(_KEY_BYTES)) -> Keys:
    """Keys of all full chunks of a prompt; none if an id is no number from 0 on."""
    try:
        links = extend_links(root, token_ids[: MAX_CHUNKS * CHUNK_TOKENS])
    except ValueError:
        return ()
    return tuple(key_of(link) for link in links[LINKS_PER_CHUNK - 1 :: LINKS_PER_CHUNK])


def text_keys(prompt: bytes, root: bytes = bytes(_KEY_BYTES)) -> Keys:
    """The same of a text whose tokens are not known, in chunks of about as many tokens."""
    keys, width = [], CHUNK_TOKENS * BYTES_PER_TOKEN
    for start in range(0, min(len(prompt), MAX_CHUNKS * width) - width + 1, width):
        piece = root + prompt[start : start + width]
        root = blake2b(piece, digest_size=_KEY_BYTES, person=b"text").digest()
        keys.append(key_of(root))
    return tuple(keys)


def key_of(link: bytes) -> int:
    """A link as the index has it."""
    return int.from_bytes(link, "big")
