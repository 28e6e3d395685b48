"""The prefix index: remembers which instance has processed which prompt prefix.

Prompts are cut into blocks, whose hashes are chained. The hashes cover token ids if they are known,
from the request itself or with `--tokenizer`, so that a prompt matches however its text was
encoded; otherwise they cover the prompt's bytes.

A chat is tokenized as the concatenation of its messages, without the model's chat template: two
chats share the same prefix either way, and templates are programs that the proxy would have to run.
"""

from __future__ import annotations

import re
from array import array
from collections import OrderedDict
from collections.abc import Collection, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any
from zlib import crc32

import msgspec

from mooncake_proxy.api.openai_bodies import OpenAIEndpoint, ParsedRequest, has_media
from mooncake_proxy.errors import DECODE_ERRORS, ConfigError

# Size of a block in tokens, of a token in bytes of text, and the most blocks hashed per prompt.
TOKENS_PER_BLOCK = 64
BYTES_PER_TOKEN = 4
MAX_BLOCKS = 256
BLOCK_BYTES = TOKENS_PER_BLOCK * BYTES_PER_TOKEN
# Mixed into the chain: text and token ids of equal bytes are different prompts.
_TEXT, _TOKENS = 0, 1
_INLINE_MEDIA = re.compile(rb'"data:[^"]*"')


def prompt_root(parsed: ParsedRequest, model: str) -> int:
    """The value that a prompt's first block is chained to.

    It differs between cache salts and adapters, which don't share KV. `model` is the first name of
    the pool's model; its aliases can't be distinguished from its adapters.
    """
    name = parsed.model if parsed.model != model else None
    if not name and not parsed.cache_salt:
        return 0
    return crc32(f"{name or ''}\0{parsed.cache_salt or ''}".encode())


def text_hashes(prompt: bytes, root: int = 0) -> tuple[int, ...]:
    """One hash per full block of text (about TOKENS_PER_BLOCK tokens), covering its prefix too."""
    return _chain(prompt, root ^ _TEXT)


def token_hashes(token_ids: Sequence[int], root: int = 0) -> tuple[int, ...]:
    """One hash per full block of TOKENS_PER_BLOCK token ids; each covers its prefix too."""
    first = [token & 0xFFFFFFFF for token in token_ids[: MAX_BLOCKS * TOKENS_PER_BLOCK]]
    return _chain(array("I", first).tobytes(), root ^ _TOKENS)


def _chain(data: bytes, value: int) -> tuple[int, ...]:
    """Chained CRC-32 of blocks. A collision causes a worse choice, never a wrong answer."""
    hashes = []
    for start in range(0, min(len(data), MAX_BLOCKS * BLOCK_BYTES) - BLOCK_BYTES + 1, BLOCK_BYTES):
        value = crc32(data[start : start + BLOCK_BYTES], value)
        hashes.append(value)
    return tuple(hashes)


class PrefixIndex:
    """Remembers on which instances blocks were prefilled, for the latest `capacity` blocks."""

    def __init__(self, capacity: int = 200_000) -> None:
        self._capacity = capacity
        self._holders: OrderedDict[int, set[str]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._holders)

    def record(self, hashes: tuple[int, ...], name: str) -> None:
        """Record that the instance `name` has prefilled these blocks."""
        holders = self._holders
        for value in hashes:
            holders.setdefault(value, set()).add(name)
            holders.move_to_end(value)
        while len(holders) > self._capacity:
            holders.popitem(last=False)

    def cached_tokens(self, hashes: tuple[int, ...]) -> dict[str, int]:
        """Approximate number of leading tokens that each instance holds, by name."""
        found: dict[str, int] = {}
        still = set(self._holders.get(hashes[0], ())) if hashes else set()
        for position, value in enumerate(hashes):
            holders = self._holders.get(value, frozenset[str]())
            # Most blocks of a prefix are where the one before is: then there is nothing to copy.
            if not still <= holders:
                found |= dict.fromkeys(still - holders, position * TOKENS_PER_BLOCK)
                still &= holders
            if not still:
                break
        return found | dict.fromkeys(still, len(hashes) * TOKENS_PER_BLOCK)

    def forget(self, names: Collection[str]) -> None:
        """Forget the blocks of an instance and its ranks: it is gone or restarted with no cache."""
        for holders in self._holders.values():
            holders.difference_update(names)


# Only this many characters of a text are tokenized to find its prefix: at BYTES_PER_TOKEN they fill
# MAX_BLOCKS blocks.
MAX_CHARACTERS = MAX_BLOCKS * TOKENS_PER_BLOCK * BYTES_PER_TOKEN


class Tokenizer:
    """A model's tokenizer. `backend` is a `tokenizers.Tokenizer`."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Token ids of `text`, optionally with the special tokens that the model adds around it."""
        ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        return ids


def load_tokenizer(folder: str) -> Tokenizer:
    """Load `tokenizer.json` from a model's folder. Raises ConfigError if that fails."""
    path = Path(folder) / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(f"--tokenizer {folder}: wanted a folder with a tokenizer.json")
    try:
        from tokenizers import Tokenizer as Backend
    except ModuleNotFoundError as exc:
        if exc.name != "tokenizers":
            raise
        raise ConfigError("--tokenizer wants: pip install tokenizers") from exc
    try:
        backend = Backend.from_file(str(path))
    except Exception as exc:  # the package raises plain Exception
        raise ConfigError(f"--tokenizer {path}: {exc}") from exc
    backend.no_truncation()
    backend.no_padding()
    return Tokenizer(backend)


def token_ids_of(parsed: ParsedRequest) -> list[int] | None:
    """The prompt's token ids if the client sent ids, else None."""
    raw = bytes(parsed.prompt).lstrip()
    if not raw.startswith(b"["):
        return None
    try:
        return msgspec.json.decode(raw, type=list[int])
    except DECODE_ERRORS:
        return None  # several prompts, or malformed: the instance will reject it


def prompt_bytes(endpoint: OpenAIEndpoint, parsed: ParsedRequest) -> bytes:
    """The prompt as JSON. In a chat a hash stands for each inline medium (`data:` URL), which tells
    prompts apart but is not as long as a book."""
    if endpoint is not OpenAIEndpoint.CHAT:
        return bytes(parsed.prompt)
    raw = bytes(parsed.messages)
    return _INLINE_MEDIA.sub(_media_hash, raw) if has_media(parsed.messages) else raw


def _media_hash(medium: re.Match[bytes]) -> bytes:
    return b'"%s"' % blake2b(medium[0], digest_size=8).hexdigest().encode()


def prompt_text(endpoint: OpenAIEndpoint, parsed: ParsedRequest) -> str | None:
    """The prompt's text, of a chat at most MAX_CHARACTERS; None if it is not text."""
    try:
        if endpoint is OpenAIEndpoint.COMPLETION:
            return msgspec.json.decode(parsed.prompt, type=str)
        raw = prompt_bytes(endpoint, parsed)
        messages = msgspec.json.decode(raw, type=list[dict[str, msgspec.Raw]])
    except DECODE_ERRORS:
        return None
    pieces, num_left = [], MAX_CHARACTERS
    for message in messages:
        piece = f"{_text(message, 'role')}\n{_text(message, 'content')}\n"[:num_left]
        pieces.append(piece)
        num_left -= len(piece)
        if not num_left:
            break
    return "".join(pieces)


def _text(message: dict[str, msgspec.Raw], field: str) -> str:
    """A message's field: its text, or its JSON if it is not a string."""
    raw = bytes(message.get(field, b'""'))
    if raw.startswith(b'"'):
        return msgspec.json.decode(raw, type=str)
    return raw.decode("utf-8", "replace")
