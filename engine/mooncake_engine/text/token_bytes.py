"""The bytes that a token stands for, so that text can be decoded one token at a time.

Two families cover every model served here: byte-level BPE (GPT-2, Llama 3, Qwen, DeepSeek) writes
each byte as one printable character; SentencePiece with byte fallback (Llama 2, Mistral) writes a
space as ``▁`` and a stray byte as ``<0xAB>``.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from mooncake_engine.errors import CheckpointError

TokenToBytes = Callable[[str], bytes]

_FALLBACK_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE_MARK = "▁"


def token_to_bytes(decoder: dict[str, Any] | None) -> TokenToBytes:
    """The function for a tokenizer's ``decoder`` section (``tokenizer.json``).

    Raises:
        CheckpointError: the decoder is of neither family.
    """
    kinds = _decoder_kinds(decoder)
    if "ByteLevel" in kinds:
        return _byte_level
    if kinds & {"ByteFallback", "Metaspace"}:
        return _sentencepiece
    raise CheckpointError(
        "the tokenizer must decode with ByteLevel, Metaspace or ByteFallback to be streamed, "
        f"found {sorted(kinds) or 'no decoder'}; convert it to a byte-level tokenizer.json"
    )


def _decoder_kinds(decoder: dict[str, Any] | None) -> set[str]:
    if decoder is None:
        return set()
    if decoder["type"] == "Sequence":
        return {part["type"] for part in decoder["decoders"]}
    return {decoder["type"]}


@lru_cache(maxsize=1)
def _byte_of_character() -> dict[str, int]:
    """GPT-2's map of bytes to printable characters, inverted (Radford et al. 2019, encoder.py)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + i): byte for i, byte in enumerate(others)
    }


def _byte_level(token: str) -> bytes:
    table = _byte_of_character()
    try:
        return bytes([table[character] for character in token])
    except KeyError:  # an added token is written as it is
        return token.encode()


def _sentencepiece(token: str) -> bytes:
    fallback = _FALLBACK_BYTE.fullmatch(token)
    if fallback:
        return bytes([int(fallback[1], 16)])
    return token.replace(_SPACE_MARK, " ").encode()
