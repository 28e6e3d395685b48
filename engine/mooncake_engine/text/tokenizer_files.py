"""What the files of a tokenizer say, without transformers: the tokens that are added to every text,
and a fingerprint by which instances compare tokenizers."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mooncake_engine.errors import CheckpointError

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
_CLASSES_WITH_FLAGS = {f"{name}Tokenizer" for name in ("Llama", "CodeLlama", "Gemma", "Cohere")}
"""The classes of tokenizers in which ``add_bos_token`` and ``add_eos_token`` replace the rule of
tokenizer.json, in transformers 4, with which most models were published."""


def set_added_tokens(backend: Any, settings: Mapping[str, Any]) -> None:
    """Have a tokenizer add BOS and EOS to every text as the flags of tokenizer_config.json say,
    where they and not tokenizer.json decide.

    Args:
        backend: a tokenizer of the library ``tokenizers``.
        settings: the content of tokenizer_config.json, with special tokens as texts.
    """
    from tokenizers.processors import TemplateProcessing

    name = str(settings.get("tokenizer_class")).removesuffix("Fast")
    if name not in _CLASSES_WITH_FLAGS or not settings.keys() & {"add_bos_token", "add_eos_token"}:
        return
    bos = settings.get("bos_token") if settings.get("add_bos_token", True) else None
    eos = settings.get("eos_token") if settings.get("add_eos_token", False) else None
    ids = {token: backend.token_to_id(token) for token in (bos, eos) if token}
    parts = [bos, "$A", eos]
    backend.post_processor = TemplateProcessing(
        single=[part for part in parts if part == "$A" or ids.get(part) is not None],
        special_tokens=[(token, id) for token, id in ids.items() if id is not None],
    )


def tokenizer_fingerprint(directory: Path, chat_template: str | None = None) -> str:
    """A hash of the tokenizer's files and chat template: equal for two directories exactly if these
    are equal.

    Args:
        directory: the model directory.
        chat_template: a template that replaces the directory's, or None.

    Raises:
        CheckpointError: the directory has no tokenizer.
    """
    present = [directory / name for name in _TOKENIZER_FILES if (directory / name).is_file()]
    if not any(
        path.name in {"tokenizer.json", "tokenizer.model", "vocab.json"} for path in present
    ):
        found = "none"
        if (directory / "tiktoken.model").is_file():
            found = "tiktoken.model: convert it to tokenizer.json, which is all that is needed"
        raise CheckpointError(
            f"wanted tokenizer.json (or tokenizer.model, vocab.json) in {directory}, found {found}"
        )
    digest = hashlib.sha256()
    for path in present:
        content = path.read_bytes()
        digest.update(f"{path.name}:{len(content)}:".encode())
        digest.update(content)
    if chat_template is not None:
        digest.update(f"chat template:{chat_template}".encode())
    return digest.hexdigest()[:32]
