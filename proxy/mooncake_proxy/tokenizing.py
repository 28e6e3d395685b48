"""The token ids of a prompt, for prefix affinity: from the request, or by a model's tokenizer.

A chat is tokenised as its messages one after the other, without the model's template: what two
chats have in common is the same either way, and templates are programs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from mooncake_proxy.errors import ConfigError
from mooncake_proxy.openai import Ask, Endpoint
from mooncake_proxy.prefix import BYTES_PER_TOKEN, MAX_BLOCKS, TOKENS_PER_BLOCK

Tokenize = Callable[[str], Sequence[int]]
# Text beyond this is not looked at: at the usual rate it fills all blocks.
MAX_CHARACTERS = MAX_BLOCKS * TOKENS_PER_BLOCK * BYTES_PER_TOKEN


def load_tokenizer(folder: str) -> Tokenize:
    """The tokenizer of a model's folder (`tokenizer.json`). ConfigError if it can't be had."""
    path = Path(folder) / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(f"--tokenizer {folder}: wanted a folder with a tokenizer.json")
    try:
        from tokenizers import Tokenizer
    except ModuleNotFoundError as exc:
        if exc.name != "tokenizers":
            raise
        raise ConfigError("--tokenizer wants: pip install mooncake-proxy[tokenizer]") from exc
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as exc:  # the package raises nothing narrower
        raise ConfigError(f"--tokenizer {path}: {exc}") from exc

    def tokenize(text: str) -> Sequence[int]:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    return tokenize


def given_token_ids(ask: Ask) -> list[int] | None:
    """The prompt's ids where the client sent ids, else None."""
    raw = bytes(ask.prompt).lstrip()
    if not raw.startswith(b"["):
        return None
    try:
        return msgspec.json.decode(raw, type=list[int])
    except msgspec.DecodeError:
        return None  # several prompts, or nonsense that the instance will name


def prompt_text(endpoint: Endpoint, ask: Ask) -> str | None:
    """What there is to tokenise, up to MAX_CHARACTERS; None where it is no text."""
    try:
        if endpoint is Endpoint.COMPLETION:
            return msgspec.json.decode(ask.prompt, type=str)[:MAX_CHARACTERS]
        messages = msgspec.json.decode(ask.messages, type=list[dict[str, msgspec.Raw]])
    except msgspec.DecodeError:
        return None
    pieces = (f"{_text(message, 'role')}\n{_text(message, 'content')}\n" for message in messages)
    return "".join(pieces)[:MAX_CHARACTERS]


def _text(message: dict[str, msgspec.Raw], field: str) -> str:
    """A field of a message: its text, or its JSON where it has parts."""
    raw = bytes(message.get(field, b'""'))
    if raw.startswith(b'"'):
        return msgspec.json.decode(raw, type=str)
    return raw.decode("utf-8", "replace")
