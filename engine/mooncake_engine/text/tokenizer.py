"""The tokenizer of a model directory: encoding and decoding, the bytes of each token, and the chat
template."""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mooncake_engine.checkpoints.model_source import read_json_object
from mooncake_engine.errors import CheckpointError, ConfigError, InvalidRequest
from mooncake_engine.text.tokenizer_files import set_added_tokens, tokenizer_fingerprint

if TYPE_CHECKING:
    from jinja2 import TemplateSyntaxError

logger = logging.getLogger(__name__)

TokenToBytes = Callable[[str], bytes]

_MAX_LOCKED_CHARACTERS = 2_000
"""The longest text that is encoded with the GIL held, for about a millisecond: tokenizers releases
it only for batches. A short text on the event loop is done before the GIL would come back."""
_MAX_LOCKED_TOKENS = 1_000
"""The most tokens that are decoded with the GIL held, for the same reason."""
_FALLBACK_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE_MARK = "▁"


def token_to_bytes(decoder: dict[str, Any] | None) -> TokenToBytes:
    """The function that converts a token's written form to its bytes.

    Args:
        decoder: the ``decoder`` section of ``tokenizer.json``.

    Raises:
        CheckpointError: the decoder is neither byte-level nor SentencePiece's.
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
    """The inverse of GPT-2's map from bytes to printable characters (Radford et al. 2019,
    encoder.py)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + i): byte for i, byte in enumerate(others)
    }


def _byte_level(token: str) -> bytes:
    table = _byte_of_character()
    try:
        return bytes([table[character] for character in token])
    except KeyError:  # an added token, which is written as plain text
        return token.encode()


def _sentencepiece(token: str) -> bytes:
    fallback = _FALLBACK_BYTE.fullmatch(token)
    if fallback:
        return bytes([int(fallback[1], 16)])
    return token.replace(_SPACE_MARK, " ").encode()


RESERVED_TEMPLATE_KWARGS = frozenset(
    {"conversation", "chat_template", "tokenize", "return_tensors", "return_dict", "messages"}
    | {"add_generation_prompt", "continue_final_message", "tokenizer_kwargs", "tools", "documents"}
)
"""Template variables that clients may not set: the server sets them, or they are arguments of
``apply_chat_template`` and not variables."""


def block_torch_import() -> None:
    """Keep transformers from importing torch in this process.

    Otherwise transformers imports torch and all its model code, which takes 300 MB of memory and
    some seconds and is not needed for tokenising. If it has been imported already, it may have seen
    that torch is installed, and could not do without it any more."""
    if "torch" not in sys.modules and "transformers" not in sys.modules:
        sys.modules["torch"] = None  # type: ignore[assignment]  # makes "import torch" fail
        logging.getLogger("transformers").addFilter(_is_not_torch_warning)


def allow_torch_import() -> None:
    """Make torch importable again. If transformers has been imported meanwhile, it keeps working
    without torch."""
    if "torch" in sys.modules and sys.modules["torch"] is None:
        del sys.modules["torch"]


def _is_not_torch_warning(record: logging.LogRecord) -> bool:
    return "PyTorch was not found" not in record.getMessage()


def _is_not_class_warning(record: logging.LogRecord) -> bool:
    """False for transformers 4's warning that a directory names another class of tokenizer."""
    return "is not the same type as the class" not in record.getMessage()


class _TokenTexts(dict[int, str | None]):
    """The text of each token id, computed on first use, so that a streamed token costs one dict
    lookup.

    Args:
        token_bytes: returns the bytes of a token.
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
    """Converts between text and token ids. Create it with ``Tokenizer.load``."""

    def __init__(self, hf_tokenizer: Any, *, fingerprint: str) -> None:
        self._hf = hf_tokenizer
        self._backend = hf_tokenizer.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        self._to_bytes: TokenToBytes = token_to_bytes(json.loads(self._backend.to_str())["decoder"])
        self._bytes: dict[int, bytes] = {}
        self.token_texts: Mapping[int, str | None] = _TokenTexts(self.token_bytes)
        """The text of each token, by id; None for a token that holds part of a character."""
        self.fingerprint = fingerprint
        self.special_ids: frozenset[int] = frozenset(hf_tokenizer.all_special_ids) | frozenset(
            token_id
            for token_id, token in self._backend.get_added_tokens_decoder().items()
            if token.special
        )

    @classmethod
    def load(cls, directory: Path, chat_template: str | None = None) -> Tokenizer:
        """Load the tokenizer of a model directory, offline.

        Args:
            directory: the model directory.
            chat_template: a template that replaces the directory's, or None.

        Raises:
            CheckpointError: the directory has no usable tokenizer.
            ConfigError: ``chat_template`` is malformed.
        """
        from importlib.metadata import version
        from importlib.util import find_spec

        fingerprint = tokenizer_fingerprint(directory, chat_template)
        if (directory / "config.json").is_file():  # transformers reads it, and blames the tokenizer
            read_json_object(directory / "config.json")
        try:
            hf_tokenizer = _read_tokenizer(directory)
        except (OSError, ValueError, ImportError) as exc:
            if not (directory / "tokenizer.json").is_file() and find_spec("sentencepiece") is None:
                raise CheckpointError(
                    f"{directory} has no tokenizer.json, and sentencepiece, which reads "
                    "tokenizer.model, is missing: pip install sentencepiece protobuf, or "
                    "add the model's tokenizer.json"
                ) from exc
            raise CheckpointError(f"can't load the tokenizer in {directory}: {exc}") from exc
        except (AttributeError, KeyError, TypeError) as exc:  # JSON of another form than expected
            raise CheckpointError(
                f"can't load the tokenizer in {directory}: one of its JSON files is not what "
                f"transformers expects: {exc!r}"
            ) from exc
        except Exception as exc:  # tokenizers has no errors of its own
            raise CheckpointError(
                f"tokenizers {version('tokenizers')} can't read {directory / 'tokenizer.json'}: "
                f"{exc}; a newer version may"
            ) from exc
        if not getattr(hf_tokenizer, "is_fast", False):
            raise CheckpointError(
                f"the tokenizer in {directory} has no fast version; add its tokenizer.json"
            )
        if chat_template is not None:
            hf_tokenizer.chat_template = chat_template
        tokenizer = cls(hf_tokenizer, fingerprint=fingerprint)
        malformed = tokenizer._syntax_error()
        if malformed is not None:
            if chat_template is not None:
                raise ConfigError(f"--chat-template is {malformed}")
            logger.warning(
                "the chat template in %s is %s; requests for chat fail, unless --chat-template "
                "gives another one",
                directory,
                malformed,
            )
        return tokenizer

    def _syntax_error(self) -> str | None:
        """What is wrong with the chat template's syntax. What it raises while it renders may be due
        to the messages."""
        from jinja2 import TemplateSyntaxError

        if not self.has_chat_template:
            return None
        try:
            self.render_chat([{"role": "user", "content": ""}])
        except InvalidRequest as exc:
            cause = exc.__cause__
            if isinstance(cause, TemplateSyntaxError):
                return _malformed(cause)
        return None

    def ordinary_tokens(self) -> dict[str, int]:
        """The id of every token that is not special, by the token's written form."""
        vocabulary: dict[str, int] = self._backend.get_vocab()
        return {token: i for token, i in vocabulary.items() if i not in self.special_ids}

    @property
    def chat_template(self) -> str | None:
        """The model's chat template; of several templates the one for tool use. None if there is
        none."""
        template = self._hf.chat_template
        if isinstance(template, dict):
            template = template.get("tool_use", template.get("default"))
        return template if isinstance(template, str) else None

    @property
    def has_chat_template(self) -> bool:
        """Whether the model has any chat template."""
        return self._hf.chat_template is not None

    def info(self) -> dict[str, Any]:
        """The configuration in the form of ``tokenizer_config.json``, as vLLM's
        ``/tokenizer_info`` has it: special tokens as texts, and the chat template in use."""
        files = ("vocab_file", "merges_file", "tokenizer_file")
        shown = {name: each for name, each in self._hf.init_kwargs.items() if name not in files}
        found: dict[str, Any] = _plain(shown)
        found["tokenizer_class"] = type(self._hf).__name__
        if self._hf.chat_template is not None:
            found["chat_template"] = self._hf.chat_template
        return found

    def encode(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        """The token ids of a text, by default with the special tokens that the model expects around
        it."""
        if len(text) > _MAX_LOCKED_CHARACTERS:
            [found] = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        else:
            found = self._backend.encode(text, add_special_tokens=add_special_tokens)
        return tuple(found.ids)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of a complete sequence of token ids."""
        text: str
        ids = list(token_ids)
        if len(ids) > _MAX_LOCKED_TOKENS:
            [text] = self._backend.decode_batch([ids], skip_special_tokens=skip_special_tokens)
        else:
            text = self._backend.decode(ids, skip_special_tokens=skip_special_tokens)
        return text

    def ids_of(self, tokens: Sequence[str]) -> frozenset[int]:
        """The ids of tokens, given in their written form; unknown tokens are skipped."""
        return frozenset(map(self._backend.token_to_id, tokens)) - {None}

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token; empty for ids that are padding of the model's vocabulary."""
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
        """Render a conversation with the model's chat template. The result is to be encoded without
        additional special tokens.

        Args:
            messages: their contents are texts or lists of text parts, in OpenAI's form.

        Raises:
            InvalidRequest: the model has no template, or the template rejects the messages.
        """
        if not self.has_chat_template:
            raise InvalidRequest(
                "the model has no chat template; use /v1/completions, or add chat_template.jinja "
                "to the model directory",
                param="messages",
            )
        # imported late: the command line must start fast
        from jinja2 import TemplateError, TemplateSyntaxError

        kwargs = dict(template_kwargs or {})
        for name in kwargs.keys() & RESERVED_TEMPLATE_KWARGS:
            raise InvalidRequest(
                f"chat_template_kwargs may not set {name!r}", param="chat_template_kwargs"
            )
        try:
            text: str = self._hf.apply_chat_template(
                self._in_templates_form(messages),
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=list(tools) or None,
                **kwargs,
            )
        except (TemplateError, ValueError, TypeError, KeyError, RecursionError) as exc:
            # transformers raises ValueError here, whose message may quote the conversation.
            if continue_final_message and isinstance(exc, ValueError):
                raise InvalidRequest(
                    "the final message can't be continued, because the model's chat template "
                    "changes it: end with a user message",
                    param="messages",
                ) from exc
            problem = f"rejects these messages: {exc}"
            if isinstance(exc, TemplateSyntaxError):
                problem = f"is {_malformed(exc)}"
            raise InvalidRequest(f"the model's chat template {problem}", param="messages") from exc
        return text

    def _in_templates_form(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Messages as the template takes them. As in vLLM, it gets parts only if it lays them out,
        and never those of a tool's result; and system messages after the first move into the first
        if it would reject them."""
        found = []
        for message in messages:
            content = message.get("content")
            if isinstance(content, list) and (message["role"] == "tool" or not self._takes_parts):
                content = _joined(content)
            found.append({**message, "content": content})
        is_later = any(message["role"] == "system" for message in found[1:])
        if not is_later or self._takes_later_system:
            return found
        texts = [_joined(each["content"]) for each in found if each["role"] == "system"]
        first = {"role": "system", "content": "\n\n".join(filter(None, texts))}
        return [first, *(each for each in found if each["role"] != "system")]

    @cached_property
    def _takes_parts(self) -> bool:
        """Whether the template lays out contents that are lists of parts: vLLM's content format
        ``openai``."""
        parts = [{"type": "text", "text": text} for text in ("One.", "Two.")]
        text = self._rendered([{"role": "user", "content": parts}]) or ""
        is_written_as_list = "'type'" in text or '"type"' in text
        return "One." in text and "Two." in text and not is_written_as_list

    @cached_property
    def _takes_later_system(self) -> bool:
        """Whether the template accepts a system message between others."""
        roles = ("system", "user", "system", "user")
        if self._rendered([{"role": role, "content": "t"} for role in roles]) is not None:
            return True
        logger.warning(
            "the chat template accepts a system message only at the start: later ones are merged "
            "into it, so that each new one changes the start of the prompt, and the prefix cache "
            "does not hit; --chat-template may give a template that accepts them"
        )
        return False

    def _rendered(self, messages: list[dict[str, Any]]) -> str | None:
        """What the template makes of these messages; None if it rejects them."""
        from jinja2 import TemplateError

        try:
            text: str = self._hf.apply_chat_template(messages, tokenize=False)
        except (TemplateError, ValueError, TypeError, KeyError, AttributeError):
            return None
        return text


def _read_tokenizer(directory: Path) -> Any:
    """transformers' tokenizer of a model directory.

    A tokenizer.json is used as it is. ``AutoTokenizer`` would read no more than the vocabulary from
    it if the directory names a class such as GPT2Tokenizer or LlamaTokenizer, and split texts as
    that class does, whatever the model was trained with."""
    if not (directory / "tokenizer.json").is_file():
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(
            directory, local_files_only=True, trust_remote_code=False, use_fast=True
        )
    from transformers import PreTrainedTokenizerFast

    logging.getLogger("transformers.tokenization_utils_base").addFilter(_is_not_class_warning)
    found = PreTrainedTokenizerFast.from_pretrained(directory, local_files_only=True)
    path = directory / "tokenizer_config.json"
    if path.is_file():
        settings = json.loads(path.read_bytes())
        set_added_tokens(found.backend_tokenizer, settings | found.special_tokens_map)
    return found


def _joined(content: str | list[dict[str, Any]] | None) -> str:
    if isinstance(content, list):
        return "\n".join(part["text"] for part in content)
    return content or ""


def _plain(value: Any) -> Any:
    """JSON of a value of a tokenizer's configuration; a token is its text."""
    if isinstance(value, dict):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(each) for each in value]
    return value if isinstance(value, str | int | float | None) else str(value)


def _malformed(error: TemplateSyntaxError) -> str:
    return f"no valid Jinja template, line {error.lineno}: {error}"


def same_tokens(directory: Path, other: Path) -> bool:
    """Whether token ids have the same meaning in two model directories. Special tokens are not
    compared, because model families rename them between releases. True if one of the directories
    has no tokenizer.

    Raises:
        CheckpointError: a tokenizer can't be loaded.
    """
    try:
        if tokenizer_fingerprint(directory) == tokenizer_fingerprint(other):
            return True
    except CheckpointError:  # one of them has no tokenizer
        return True
    mine, theirs = (Tokenizer.load(path).ordinary_tokens() for path in (directory, other))
    return mine == theirs
