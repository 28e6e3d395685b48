"""A model's tokenizer for prompts of a given length: its ``tokenizer.json`` and its chat template,
without transformers."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from mooncake_engine.errors import ConfigError

_ATTEMPTS = 10
"""A text of random tokens is cut otherwise when it is read again; so often its length is mended."""


class PromptTokenizer:
    """Text to token ids and back. Use ``load``.

    Args:
        tokenizer: of the library ``tokenizers``.
        settings: of ``tokenizer_config.json``.
        template: how a conversation is laid out; None where the model has none.
    """

    def __init__(self, tokenizer: Any, settings: dict[str, Any], template: str | None) -> None:
        self._tokenizer = tokenizer
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._settings = settings
        self._template = template

    @classmethod
    def load(cls, wanted: str) -> PromptTokenizer:
        """Of a model directory, or of ``ORG/NAME[@REVISION]`` on Hugging Face's hub.

        Raises:
            ConfigError: there is no such tokenizer.
        """
        from tokenizers import Tokenizer

        directory = Path(wanted)
        if not directory.is_dir():
            directory = _fetched(wanted)
        try:
            tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
            settings = _json_of(directory / "tokenizer_config.json")
        except ValueError as exc:
            raise ConfigError(f"can't read the tokenizer in {directory}: {exc}") from exc
        except Exception as exc:  # the library raises nothing narrower
            raise ConfigError(
                f"--tokenizer: no readable tokenizer.json in {directory}: {exc}"
            ) from exc
        template = settings.get("chat_template")
        separate = directory / "chat_template.jinja"
        if separate.is_file():
            template = separate.read_text(encoding="utf-8")
        return cls(tokenizer, settings, template if isinstance(template, str) else None)

    def count(self, text: str) -> int:
        """Tokens of a prompt, with those that the tokenizer adds to every text."""
        return len(self._tokenizer.encode(text).ids)

    @property
    def num_added(self) -> int:
        """Tokens that the tokenizer adds to every text, such as BOS."""
        return int(self._tokenizer.num_special_tokens_to_add(is_pair=False))

    @cached_property
    def ordinary_ids(self) -> list[int]:
        """Token ids in rising order, without the special ones and those that are only a part of a
        character."""
        added = self._tokenizer.get_added_tokens_decoder()
        special = {token_id for token_id, token in added.items() if token.special}
        ids = {*self._tokenizer.get_vocab(with_added_tokens=False).values()} - special
        ordered = sorted(ids)
        texts = self._tokenizer.decode_batch([[token_id] for token_id in ordered])
        return [i for i, text in zip(ordered, texts, strict=True) if "\ufffd" not in text]

    def text_of_length(self, ids: Sequence[int], numbers: random.Random) -> str:
        """Text of some tokens that has as many when it is read again, as far as that can be had:
        what the reading adds is cut off, what it takes away is filled with random tokens."""
        wanted, found, text = len(ids), list(ids), ""
        for attempt in range(_ATTEMPTS):
            text = str(self._tokenizer.decode(found))
            if attempt:
                text = text.rstrip("\ufffd")  # a cut went through a character
            found = self._tokenizer.encode(text, add_special_tokens=False).ids
            if len(found) == wanted:
                return text
            missing = wanted - len(found)
            found = found[:wanted] + numbers.choices(self.ordinary_ids, k=max(missing, 0))
        return text

    def as_chat(self, prompt: str) -> str:
        """A user's message as the model's chat template has it.

        Raises:
            ConfigError: the model has no template, or it refuses the message.
        """
        if self._template is None:
            raise ConfigError(
                "the tokenizer has no chat template: say --skip-chat-template, or use a chat "
                "endpoint (--backend openai-chat)"
            )
        from mooncake_engine.replay.prompt_template import render_user_message

        return render_user_message(self._template, prompt, self._special_texts())

    def _special_texts(self) -> dict[str, str]:
        """``bos_token`` and its like, which are texts or objects with a text."""
        named = {name: value for name, value in self._settings.items() if name.endswith("_token")}
        texts = {
            name: value.get("content") if isinstance(value, dict) else value
            for name, value in named.items()
        }
        return {name: text for name, text in texts.items() if isinstance(text, str)}


def _json_of(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}


def _fetched(wanted: str) -> Path:
    """The folder of the hub's cache that holds a model's tokenizer."""
    repository, _, revision = wanted.partition("@")
    if "/" not in repository or repository.startswith(("/", ".")):
        raise ConfigError(
            f"--tokenizer must be a model directory or ORG/NAME of a hub, got {wanted!r}, which "
            "does not exist; without --tokenizer it is --model"
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    files = ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"]
    try:
        return Path(snapshot_download(repository, revision=revision or None, allow_patterns=files))
    except (OSError, HfHubHTTPError, HFValidationError, LocalEntryNotFoundError) as exc:
        raise ConfigError(
            f"--tokenizer: {wanted} is no directory, and can't be fetched as a tokenizer of the "
            f"hub: {exc}"
        ) from exc
