"""Converts a GGUF file's vocabulary to tokenizer.json and tokenizer_config.json.

The file has only the name of the rule by which text is split before byte pairs are merged; the
regular expressions are in llama.cpp's source (``llama-vocab.cpp``). Those of the supported model
families are repeated here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mooncake_engine.errors import CheckpointError

if TYPE_CHECKING:
    from tokenizers import Tokenizer, pre_tokenizers

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|"
    r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_WHOLE_FIRST = ("llama-bpe", "llama3", "llama-v3", "tekken")
"""Those that take a word that is a token as that token, without merging, and add BOS by default."""
_SPLITS = dict.fromkeys((*_WHOLE_FIRST, "smaug-bpe", "dbrx"), _LLAMA3)
_SPLITS |= {"tekken": _TEKKEN, "qwen2": _QWEN2, "deepseek-r1-qwen": _QWEN2}
_DIGITS = ("smollm", "starcoder", "refact", "codeshell", "command-r")
_PLAIN = ("gpt-2", "gpt2", "default")
_SPACE = "▁"


class TokenType(IntEnum):
    """The type of a token (``llama_token_type``)."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


class GGUFTokenizer:
    """The tokenizer in a GGUF file's metadata.

    Raises:
        CheckpointError: the file has no tokenizer, or one of an unknown kind.
    """

    def __init__(self, path: Path, metadata: Mapping[str, Any]) -> None:
        self._path = path
        self._metadata = metadata
        self._tokens: list[str] = self._need("tokens")
        self._types: list[int] = self._get("token_type", [TokenType.NORMAL] * len(self._tokens))
        self._ids = {token: i for i, token in enumerate(self._tokens)}

    def backend(self) -> Tokenizer:
        """The tokenizer, to be saved as tokenizer.json."""
        from tokenizers import AddedToken, Tokenizer, processors

        kind = self._need("model")
        if kind == "gpt2":
            tokenizer = self._byte_pairs(Tokenizer)
        elif kind == "llama":
            tokenizer = self._sentencepiece(Tokenizer)
        else:
            raise self._unknown("model", kind)
        added: dict[int, bool] = {TokenType.CONTROL: True, TokenType.USER_DEFINED: False}
        for token, token_type in zip(self._tokens, self._types, strict=True):
            if (is_special := added.get(token_type)) is not None:  # of unknown types: normal
                tokenizer.add_tokens([AddedToken(token, special=is_special, normalized=False)])
        bos = self._special("bos")
        if bos is not None and self._adds_bos(kind):
            tokenizer.post_processor = processors.TemplateProcessing(
                single=f"{bos} $A",
                pair=f"{bos} $A {bos} $B",
                special_tokens=[(bos, self._ids[bos])],
            )
        return tokenizer

    def config(self) -> dict[str, Any]:
        """The content of tokenizer_config.json."""
        names = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
        found = {f"{name}_token": self._special(key) for key, name in names.items()}
        template = self._metadata.get("tokenizer.chat_template")
        return {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            **{name: token for name, token in found.items() if token is not None},
            **({"chat_template": template} if template else {}),
        }

    def _byte_pairs(self, make: type[Tokenizer]) -> Tokenizer:
        from tokenizers import decoders, models, normalizers

        split = self._get("pre", "default")
        tokenizer = make(
            models.BPE(
                self._ids,
                [_pair(merge) for merge in self._get("merges", [])],
                ignore_merges=split in _WHOLE_FIRST,
            )
        )
        if split == "qwen2":
            tokenizer.normalizer = normalizers.NFC()
        tokenizer.pre_tokenizer = self._pre_tokenizer(split)
        tokenizer.decoder = decoders.ByteLevel()
        return tokenizer

    def _pre_tokenizer(self, split: str) -> pre_tokenizers.PreTokenizer:
        from tokenizers import Regex, pre_tokenizers

        if split in _SPLITS:
            by_expression = pre_tokenizers.Split(Regex(_SPLITS[split]), "isolated")
            to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
            return pre_tokenizers.Sequence([by_expression, to_bytes])
        plain = pre_tokenizers.ByteLevel(add_prefix_space=False)
        if split in _DIGITS:
            digits = pre_tokenizers.Digits(individual_digits=True)
            return pre_tokenizers.Sequence([digits, plain])
        if split in _PLAIN:
            return plain
        raise self._unknown("pre", split)

    def _sentencepiece(self, make: type[Tokenizer]) -> Tokenizer:
        from tokenizers import decoders, models, normalizers

        merges = list(merges_of(self._ids, self._need("scores")))
        unknown = self._special("unknown")
        tokenizer = make(
            models.BPE(self._ids, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
        )
        adds_space = bool(self._get("add_space_prefix", True))
        spaces = normalizers.Replace(" ", _SPACE)
        tokenizer.normalizer = (
            normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if adds_space else spaces
        )
        parts = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        parts += [decoders.Strip(" ", 1, 0)] if adds_space else []
        tokenizer.decoder = decoders.Sequence(parts)
        return tokenizer

    def _adds_bos(self, kind: str) -> bool:
        by_default = kind == "llama" or self._get("pre", "") in _WHOLE_FIRST
        return bool(self._get("add_bos_token", by_default))

    def _special(self, name: str) -> str | None:
        token_id = self._get(f"{name}_token_id", None)
        return None if token_id is None else self._tokens[token_id]

    def _get(self, key: str, default: Any) -> Any:
        return self._metadata.get(f"tokenizer.ggml.{key}", default)

    def _need(self, key: str) -> Any:
        value = self._get(key, None)
        if value is None:
            raise CheckpointError(f"{self._path} has no tokenizer.ggml.{key}: {_REMEDY}")
        return value

    def _unknown(self, key: str, value: str) -> CheckpointError:
        return CheckpointError(
            f"{self._path}: tokenizer.ggml.{key} {value!r} is not supported: {_REMEDY}"
        )


_REMEDY = "put tokenizer.json and tokenizer_config.json of the original model beside the file"


def _pair(merge: str) -> tuple[str, str]:
    first, _, second = merge.partition(" ")
    return first, second


def merges_of(ids: Mapping[str, int], scores: Sequence[float]) -> Iterator[tuple[str, str]]:
    """The merges that a SentencePiece vocabulary implies: every way to compose a token from two
    others, tokens with the highest score first."""
    found = []
    for token, token_id in ids.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in ids and right in ids:
                found.append((-scores[token_id], ids[left], ids[right], left, right))
    found.sort()
    return ((left, right) for *_, left, right in found)
