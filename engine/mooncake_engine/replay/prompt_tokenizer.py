"""Loads a model's ``tokenizer.json`` and chat template without transformers, for prompts of a given
length in ``bench serve``."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from mooncake_engine.errors import ConfigError
from mooncake_engine.text.tokenizer_files import set_added_tokens

_MAX_CORRECTIONS = 10
"""How often the length of a random text is corrected: random tokens, once decoded, are encoded to
different tokens again."""


class PromptTokenizer:
    """Converts between text and token ids. Create it with ``load``.

    Args:
        tokenizer: a tokenizer of the library ``tokenizers``.
        settings: the content of ``tokenizer_config.json``.
        template: the model's chat template; None if it has none.
    """

    def __init__(self, tokenizer: Any, settings: dict[str, Any], template: str | None) -> None:
        self._tokenizer = tokenizer
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._settings = settings
        set_added_tokens(tokenizer, settings | self._special_texts())
        self._template = template

    @classmethod
    def load(cls, wanted: str) -> PromptTokenizer:
        """Load the tokenizer of a model directory, or of ``ORG/NAME[@REVISION]`` on the Hugging
        Face hub.

        Raises:
            ConfigError: the tokenizer does not exist or can't be read.
        """
        from tokenizers import Tokenizer

        directory = Path(wanted)
        if not directory.is_dir():
            directory = _download(wanted)
        try:
            tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
            settings = _json_of(directory / "tokenizer_config.json")
        except ValueError as exc:
            raise ConfigError(f"can't read the tokenizer in {directory}: {exc}") from exc
        except Exception as exc:  # tokenizers raises plain Exception
            raise ConfigError(
                f"--tokenizer: no readable tokenizer.json in {directory}: {exc}"
            ) from exc
        template = settings.get("chat_template")
        separate = directory / "chat_template.jinja"
        if separate.is_file():
            template = separate.read_text(encoding="utf-8")
        return cls(tokenizer, settings, template if isinstance(template, str) else None)

    def count(self, text: str) -> int:
        """The number of tokens of a prompt, including those that the tokenizer adds to every
        text."""
        return len(self._tokenizer.encode(text).ids)

    @property
    def num_added(self) -> int:
        """The number of tokens that the tokenizer adds to every text, such as BOS."""
        return int(self._tokenizer.num_special_tokens_to_add(is_pair=False))

    @cached_property
    def ordinary_ids(self) -> list[int]:
        """Ascending token ids, without special tokens and tokens that hold part of a character."""
        added = self._tokenizer.get_added_tokens_decoder()
        special = {token_id for token_id, token in added.items() if token.special}
        ids = {*self._tokenizer.get_vocab(with_added_tokens=False).values()} - special
        ordered = sorted(ids)
        texts = self._tokenizer.decode_batch([[token_id] for token_id in ordered])
        return [i for i, text in zip(ordered, texts, strict=True) if "\ufffd" not in text]

    def text_of_length(self, ids: Sequence[int], numbers: random.Random) -> str:
        """A text that starts with the given tokens and has the same number of tokens when encoded
        again, as far as possible. Surplus tokens are cut off, missing ones are filled with random
        tokens."""
        wanted, found, text = len(ids), list(ids), ""
        for attempt in range(_MAX_CORRECTIONS):
            text = str(self._tokenizer.decode(found))
            if attempt:
                text = text.rstrip("\ufffd")  # the cut may have split a character
            found = self._tokenizer.encode(text, add_special_tokens=False).ids
            if len(found) == wanted:
                return text
            missing = wanted - len(found)
            found = found[:wanted] + numbers.choices(self.ordinary_ids, k=max(missing, 0))
        return text

    def as_chat(self, prompt: str) -> str:
        """Render a user message with the model's chat template.

        Raises:
            ConfigError: the model has no template, or the template rejects the message.
        """
        if self._template is None:
            raise ConfigError(
                "the tokenizer has no chat template: use --skip-chat-template, or a chat endpoint "
                "(--backend openai-chat)"
            )
        from mooncake_engine.replay.prompt_template import render_user_message

        return render_user_message(self._template, prompt, self._special_texts())

    def _special_texts(self) -> dict[str, str]:
        """The special tokens by variable name, such as ``bos_token``. The file holds them as texts
        or as objects with a text."""
        named = {name: value for name, value in self._settings.items() if name.endswith("_token")}
        texts = {
            name: value.get("content") if isinstance(value, dict) else value
            for name, value in named.items()
        }
        return {name: text for name, text in texts.items() if isinstance(text, str)}


def _json_of(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}


def _download(wanted: str) -> Path:
    """Download a model's tokenizer to the hub's cache; returns its folder there."""
    repository, _, revision = wanted.partition("@")
    if "/" not in repository or repository.startswith(("/", ".")):
        raise ConfigError(
            f"--tokenizer (default: --model) must be a model directory or ORG/NAME on the hub; "
            f"{wanted!r} does not exist"
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    files = ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"]
    try:
        return Path(snapshot_download(repository, revision=revision or None, allow_patterns=files))
    except (OSError, HfHubHTTPError, HFValidationError, LocalEntryNotFoundError) as exc:
        raise ConfigError(
            f"--tokenizer: {wanted} is not a directory and can't be downloaded from the hub: {exc}"
        ) from exc
