"""A model directory's tokenizer: ids, bytes of each token, chat template, fingerprint."""

from __future__ import annotations

import hashlib
import json
import logging
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from mooncake_engine.errors import CheckpointError, InvalidRequest

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


_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
RESERVED_TEMPLATE_KWARGS = frozenset(
    {"conversation", "chat_template", "tokenize", "return_tensors", "return_dict", "messages"}
    | {"add_generation_prompt", "continue_final_message", "tokenizer_kwargs", "tools", "documents"}
)
"""What a client may not pass to the template: ours to decide, or not a template variable."""


def leave_torch_out() -> None:
    """Have a process read text without torch: where transformers finds it, it imports it and all
    that it has models with, which takes 300 MB and seconds, and nothing of it is used for text."""
    if "torch" not in sys.modules:
        sys.modules["torch"] = None  # type: ignore[assignment]  # Python: it is not there
        logging.getLogger("transformers").addFilter(_is_not_about_torch)


def let_torch_in() -> None:
    """Have torch be there again; transformers has looked and does without for ever."""
    if "torch" in sys.modules and sys.modules["torch"] is None:
        del sys.modules["torch"]


def _is_not_about_torch(record: logging.LogRecord) -> bool:
    return "PyTorch was not found" not in record.getMessage()


class _TokenTexts(dict[int, str | None]):
    """Texts by token id, found when they are first wanted: a lookup per streamed token.

    Args:
        token_bytes: of a token.
    """

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        super().__init__()
        self._token_bytes = token_bytes

    def __missing__(self, token_id: int) -> str | None:
        try:
            text = self._token_bytes(token_id).decode()
        except UnicodeDecodeError:
            text = None
        self[token_id] = text
        return text


class Tokenizer:
    """Text to token ids and back. Use ``Tokenizer.load``."""

    def __init__(self, hf_tokenizer: Any, *, fingerprint: str) -> None:
        self._hf = hf_tokenizer
        self._backend = hf_tokenizer.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        self._to_bytes: TokenToBytes = token_to_bytes(json.loads(self._backend.to_str())["decoder"])
        self._bytes: dict[int, bytes] = {}
        self.token_texts: Mapping[int, str | None] = _TokenTexts(self.token_bytes)
        """The text of each token that consists of whole characters; None for one that does not."""
        self.fingerprint = fingerprint
        self.special_ids: frozenset[int] = frozenset(hf_tokenizer.all_special_ids) | frozenset(
            token_id
            for token_id, token in self._backend.get_added_tokens_decoder().items()
            if token.special
        )

    @classmethod
    def load(cls, directory: Path, chat_template: str | None = None) -> Tokenizer:
        """Read a model directory's tokenizer, offline.

        Args:
            chat_template: in place of the directory's.

        Raises:
            CheckpointError: no usable tokenizer there.
        """
        from transformers import AutoTokenizer

        fingerprint = tokenizer_fingerprint(directory, chat_template)
        try:
            hf_tokenizer = AutoTokenizer.from_pretrained(
                directory, local_files_only=True, trust_remote_code=False, use_fast=True
            )
        except (OSError, ValueError, KeyError, TypeError, ImportError) as exc:
            raise CheckpointError(f"can't load the tokenizer in {directory}: {exc}") from exc
        if not getattr(hf_tokenizer, "is_fast", False):
            raise CheckpointError(
                f"{directory} holds a tokenizer without a fast form; add its tokenizer.json"
            )
        if chat_template is not None:
            hf_tokenizer.chat_template = chat_template
        return cls(hf_tokenizer, fingerprint=fingerprint)

    def ordinary_tokens(self) -> dict[str, int]:
        """Every token's id, by how the tokenizer writes it; special ones are left out."""
        vocabulary: dict[str, int] = self._backend.get_vocab()
        return {token: i for token, i in vocabulary.items() if i not in self.special_ids}

    @property
    def chat_template(self) -> str | None:
        """How the model lays a conversation out; of several templates the one with tools."""
        template = self._hf.chat_template
        if isinstance(template, dict):
            template = template.get("tool_use", template.get("default"))
        return template if isinstance(template, str) else None

    @property
    def has_chat_template(self) -> bool:
        """Whether the model says how a conversation is laid out."""
        return self._hf.chat_template is not None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Token ids of a text, with the tokens that the model wants around it if asked."""
        return tuple(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of a whole sequence of token ids."""
        text: str = self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    def ids_of(self, tokens: Sequence[str]) -> frozenset[int]:
        """Ids of tokens as the tokenizer writes them; those that it does not have are left out."""
        return frozenset(map(self._backend.token_to_id, tokens)) - {None}

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token; empty for ids that only pad the model's vocabulary."""
        found = self._bytes.get(token_id)
        if found is None:
            token = self._backend.id_to_token(token_id)
            found = self._bytes[token_id] = b"" if token is None else self._to_bytes(token)
        return found

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] = (),
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """A conversation laid out by the model's chat template, ready for ``encode`` without
        special tokens.

        Raises:
            InvalidRequest: no template, or the template refuses these messages.
        """
        if not self.has_chat_template:
            raise InvalidRequest(
                "the model has no chat template; use /v1/completions, or add chat_template.jinja "
                "to the model directory",
                param="messages",
            )
        from jinja2 import TemplateError  # not before: a command line is read without it

        kwargs = dict(template_kwargs or {})
        for name in kwargs.keys() & RESERVED_TEMPLATE_KWARGS:
            raise InvalidRequest(
                f"chat_template_kwargs may not set {name!r}", param="chat_template_kwargs"
            )
        try:
            text: str = self._hf.apply_chat_template(
                list(messages),
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=list(tools) or None,
                **kwargs,
            )
        except (TemplateError, ValueError, TypeError, KeyError, RecursionError) as exc:
            if continue_final_message and isinstance(exc, ValueError):  # its message has it all
                raise InvalidRequest(
                    "the model's chat template does not show the final message as it is, so that "
                    "it can't be continued: end with a message of the user's",
                    param="messages",
                ) from exc
            raise InvalidRequest(
                f"the model's chat template refuses these messages: {exc}", param="messages"
            ) from exc
        return text


def same_tokens(directory: Path, other: Path) -> bool:
    """Whether token ids mean the same in two model directories, special ones aside: these are
    renamed from one release of a family to the next. True where one of them has no tokenizer.

    Raises:
        CheckpointError: a tokenizer that can't be loaded.
    """
    try:
        if tokenizer_fingerprint(directory) == tokenizer_fingerprint(other):
            return True
    except CheckpointError:  # one has none
        return True
    mine, theirs = (Tokenizer.load(path).ordinary_tokens() for path in (directory, other))
    return mine == theirs


def tokenizer_fingerprint(directory: Path, chat_template: str | None = None) -> str:
    """Equal for two directories exactly when their tokenizers and chat templates are.

    Args:
        chat_template: in place of the directory's, or None.

    Raises:
        CheckpointError: the directory holds no tokenizer.
    """
    present = [directory / name for name in _TOKENIZER_FILES if (directory / name).is_file()]
    if not any(
        path.name in {"tokenizer.json", "tokenizer.model", "vocab.json"} for path in present
    ):
        raise CheckpointError(
            f"wanted tokenizer.json (or tokenizer.model, vocab.json) in {directory}, found none"
        )
    digest = hashlib.sha256()
    for path in present:
        content = path.read_bytes()
        digest.update(f"{path.name}:{len(content)}:".encode())
        digest.update(content)
    if chat_template is not None:
        digest.update(f"chat template:{chat_template}".encode())
    return digest.hexdigest()[:32]
