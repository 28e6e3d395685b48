"""Keys of a prompt's chunks: what the conductor's index is asked for, and filled with.

    key_i = BLAKE2b(key_{i-1}, tokens of chunk i), 64 bits; key_0 from adapter and cache salt

They are the proxy's own: instances name their blocks each in its own way, but publish the tokens.
Without token ids the bytes of the prompt are chained instead. A collision costs one worse choice,
never a wrong answer.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

from mooncake_proxy.api.openai_bodies import OpenAIEndpoint
from mooncake_proxy.api.proxied_request import RequestContext
from mooncake_proxy.routing.prefix_index import given_token_ids

CHUNK_TOKENS = 64
BYTES_PER_TOKEN = 4
# Of a longer prompt the rest has no keys: 256 Ki tokens.
MAX_CHUNKS = 4096
_KEY_BYTES = 8
Keys = tuple[int, ...]


def chain_root(adapter: str = "", cache_salt: str = "") -> int:
    """What a prompt's first chunk is chained to: KV of another adapter or tenant is another's."""
    if not adapter and not cache_salt:
        return 0
    data = f"{adapter}\0{cache_salt}".encode("utf-8", "replace")
    return int.from_bytes(blake2b(data, digest_size=_KEY_BYTES, person=b"root").digest(), "big")


def token_keys(token_ids: Sequence[int], root: int = 0, size: int = CHUNK_TOKENS) -> Keys:
    """Keys of all full chunks of `size` token ids."""
    try:
        data = array("Q", token_ids[: MAX_CHUNKS * size]).tobytes()
    except (OverflowError, TypeError):  # ids below 0 or no numbers: an instance will refuse them
        return ()
    return _chain(data, root, 8 * size, b"tokens")


def text_keys(prompt: bytes, root: int = 0, size: int = CHUNK_TOKENS) -> Keys:
    """The same of a text, in chunks of about `size` tokens."""
    width = size * BYTES_PER_TOKEN
    return _chain(prompt[: MAX_CHUNKS * width], root, width, b"text")


def keys_of(context: RequestContext) -> Keys:
    """Keys of the prompt's chunks: of its token ids where they are known, else of its bytes."""
    parsed = context.parsed
    root = chain_root("", parsed.cache_salt or "")
    ids = context.token_ids if context.token_ids is not None else given_token_ids(parsed)
    if ids is not None:
        return token_keys(ids, root)
    is_chat = context.endpoint is OpenAIEndpoint.CHAT
    return text_keys(bytes(parsed.messages if is_chat else parsed.prompt), root)


def _chain(data: bytes, root: int, width: int, kind: bytes) -> Keys:
    keys, parent = [], root.to_bytes(_KEY_BYTES, "big")
    for start in range(0, len(data) - width + 1, width):
        chunk = data[start : start + width]
        parent = blake2b(parent + chunk, digest_size=_KEY_BYTES, person=kind).digest()
        keys.append(int.from_bytes(parent, "big"))
    return tuple(keys)
