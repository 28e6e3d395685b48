"""Parsers for tool-call formats with special tokens (DeepSeek's, Mistral's), and the registry of
all formats by name."""

from __future__ import annotations

import re
from types import MappingProxyType
from typing import Literal

from mooncake_engine.text.tool_call_parsers import (
    HermesParser,
    JsonCallParser,
    Llama3Parser,
    ObjectScanner,
    Qwen3CoderParser,
    Schemas,
    ToolCallParser,
)

_MAX_HEAD_CHARACTERS = 1024
"""The most characters between a call's tag and its arguments; a longer head is no call."""


def _deepseek_tag(*words: str) -> str:
    """A DeepSeek tag, which is written with a fullwidth bar (U+FF5C) and low blocks (U+2581)."""
    return "<\uff5c" + "\u2581".join(("tool", *words)) + "\uff5c>"


class DeepseekParser(JsonCallParser):
    """Parses DeepSeek's calls: all calls are between two tags, each in one of two formats.

    ::

        <CALL_BEGIN>function<SEP>NAME, a line break, ```json {…} ```<CALL_END>     V3, R1
        <CALL_BEGIN>NAME<SEP>{…}<CALL_END>                                         V3.1
    """

    opening, closing = _deepseek_tag("calls", "begin"), _deepseek_tag("calls", "end")
    call, call_end = _deepseek_tag("call", "begin"), _deepseek_tag("call", "end")
    separator = _deepseek_tag("sep")
    special_tokens = (opening, closing, call, separator, call_end)
    _FENCE = "```json"

    def __init__(self, schemas: Schemas = MappingProxyType({})) -> None:
        super().__init__(schemas)
        self._is_fenced = False

    def _read_text(self) -> bool:
        """Read text up to an opening tag. After a call, the tag that closes all calls is
        skipped."""
        tags = (self.opening, self.call, *([self.closing] if self._is_after_call else []))
        found = [(start, tag) for tag in tags if (start := self._held.find(tag)) >= 0]
        if found:
            start, tag = min(found)
            self._release(start)
            if tag == self.closing and self._is_after_call:
                self._held = self._held[len(tag) :]
            elif tag != self.closing:
                self._state, self._is_after_call = self._read_call_head, False
            return True
        return self._release_except(*tags)

    def _read_call_head(self) -> bool:
        """Read tags and name, up to the arguments."""
        has_outer = self._held.startswith(self.opening)
        inner = self._held[len(self.opening) :].lstrip() if has_outer else self._held
        if self.call.startswith(inner) and inner != self.call:
            return False
        head = self._head_of(inner[:_MAX_HEAD_CHARACTERS]) if inner.startswith(self.call) else ""
        if head is None and len(inner) < _MAX_HEAD_CHARACTERS:
            return False
        if not head:
            self._reject()
            return True
        name, start = head
        self._name_call(name)
        self._held, self._scanner = inner[start:], ObjectScanner()
        self._state = self._read_arguments
        return True

    def _head_of(self, text: str) -> tuple[str, int] | Literal[""] | None:
        """The name of a call and the offset of its arguments; an empty string if the text is no
        call, None if more text is needed to decide."""
        name, found, rest = text[len(self.call) :].partition(self.separator)
        if not found:
            return None
        rest = rest.lstrip()
        self._is_fenced = bool(rest) and not rest.startswith("{")
        if self._is_fenced:
            if name.strip() != "function":
                return ""
            name, found, rest = rest.partition("\n")
            rest = rest.lstrip()
            if rest.startswith(self._FENCE):
                rest = rest[len(self._FENCE) :].lstrip()
            elif not found or self._FENCE.startswith(rest):
                return None
            else:
                return ""
        if not rest:
            return None
        is_name = bool(name.strip()) and "<" not in name
        return (name.strip(), len(text) - len(rest)) if is_name and rest.startswith("{") else ""

    def _reject(self) -> None:
        tag = self.opening if self._held.startswith(self.opening) else self.call
        self._emit(tag)
        self._held = self._held[len(tag) :]
        self._state = self._read_text

    def _end_call(self, missing: list[str]) -> bool:
        self._tail = [*(["```"] if self._is_fenced else []), self.call_end]
        self._state = self._read_tail
        return True


class MistralParser(JsonCallParser):
    """Parses Mistral's calls: one token and a list of calls, or a token, a name and arguments for
    each call.

    ::

        [TOOL_CALLS][{"name": …, "arguments": {…}, "id": …}, …]           up to tokenizer v7
        [TOOL_CALLS]NAME[CALL_ID]…[ARGS]{…}[TOOL_CALLS]NAME[ARGS]{…}      since v11
    """

    opening = "[TOOL_CALLS]"
    special_tokens = (opening, "[CALL_ID]", "[ARGS]")
    _NAMED = re.compile(
        r"\s*(?P<name>[\w.\-]{1,256})(\[CALL_ID\][^\[\]{}]{0,64})?(\[ARGS\])?\s*(?=\{)"
    )
    _ITEM_END = re.compile(r'\s*(,\s*"id"\s*:\s*"[^"\\]{0,64}"\s*)?\}')
    _ID = '"id"'
    ignored_fields = frozenset({"id"})

    def __init__(self, schemas: Schemas = MappingProxyType({})) -> None:
        super().__init__(schemas)
        self._is_list = False

    def _read_text(self) -> bool:
        start = self._held.find(self.opening)
        if start >= 0:
            self._release(start)
            self._state, self._is_after_call = self._read_form, False
            return True
        return self._release_except(self.opening)

    def _read_form(self) -> bool:
        """Read what follows the tag: a list or a name."""
        rest = self._held[len(self.opening) :].lstrip()
        self._is_list = rest.startswith("[")
        if self._is_list:
            item = rest[1:].lstrip()
            if item.startswith("{"):
                return self._begin_call(len(self._held) - len(item))
            if not item:
                return False
            self._reject()
            return True
        if "{" not in rest[:_MAX_HEAD_CHARACTERS] and len(rest) < _MAX_HEAD_CHARACTERS:
            return False
        named = self._NAMED.match(rest[:_MAX_HEAD_CHARACTERS])
        if named is None:
            self._reject()
            return True
        self._name_call(named["name"])
        self._held = rest[named.end() :]
        self._scanner, self._state = ObjectScanner(), self._read_arguments
        return True

    def _reject(self) -> None:
        end = len(self.opening) if self._held.startswith(self.opening) else self._start
        self._emit(self._held[:end])
        self._held = self._held[end:]
        self._state = self._read_text

    def _end_call(self, missing: list[str]) -> bool:
        if not self._is_list:
            self._tail, self._state = [], self._read_tail
        else:
            self._state = self._read_item_end if missing else self._read_separator
        return True

    def _read_item_end(self) -> bool:
        """Read the closing bracket of a list item, with the item's id before it."""
        end = self._ITEM_END.match(self._held[:_MAX_HEAD_CHARACTERS])
        if end is not None:
            self._held, self._state = self._held[end.end() :], self._read_separator
            return True
        rest = self._held.lstrip()
        field = rest[1:].lstrip()
        may_be_id = field.startswith(self._ID) or self._ID.startswith(field)
        if len(self._held) < _MAX_HEAD_CHARACTERS and (not rest or (rest[0] == "," and may_be_id)):
            return False
        self._state = self._read_text
        return True

    def _read_separator(self) -> bool:
        """Read up to the next item of the list, or its end."""
        rest = self._held.lstrip()
        item = rest[1:].lstrip() if rest.startswith(",") else ""
        if rest.startswith("]"):
            self._held, self._state, self._is_after_call = rest[1:], self._read_text, True
            return True
        if item.startswith("{"):
            return self._begin_call(len(self._held) - len(item))
        if item or rest[:1] not in ("", ","):
            self._state = self._read_text
            return True
        return False


PARSERS: dict[str, type[ToolCallParser]] = {
    "hermes": HermesParser,
    "llama3_json": Llama3Parser,
    "qwen3_coder": Qwen3CoderParser,
    "deepseek_v3": DeepseekParser,
    "deepseek_v31": DeepseekParser,
    "mistral": MistralParser,
}
"""The parser of each format, by the format's name in vLLM."""


def detect_parser(chat_template: str | None) -> str | None:
    """The format that a chat template describes to the model, or None."""
    if chat_template is None or "tools" not in chat_template:
        return None
    if Qwen3CoderParser.function in chat_template:  # first: it is nested in Hermes' tags
        return "qwen3_coder"
    if HermesParser.opening in chat_template:
        return "hermes"
    if DeepseekParser.opening in chat_template:
        return "deepseek_v3" if "```json" in chat_template else "deepseek_v31"
    if MistralParser.opening in chat_template:
        return "mistral"
    is_llama = '"parameters"' in chat_template and "<|start_header_id|>" in chat_template
    return "llama3_json" if is_llama else None
