"""Qwen3-Coder's tool calls: tags instead of JSON, and arguments without quotes.

    <tool_call>
    <function=write_file>
    <parameter=path>
    notes.txt
    </parameter>
    </function>
    </tool_call>

What type an argument has its tool's schema says. Strings go on as they are written; other arguments
when they are complete. The outer tags may be missing: models forget them.
"""

from __future__ import annotations

import json
import re
from types import MappingProxyType

from mooncake_engine.text.argument_types import encode_argument, types_of
from mooncake_engine.text.tool_calls import (
    CallDelta,
    ParsedText,
    Schemas,
    ToolCallParser,
    overlap,
)

_LONGEST_NAME = 1024
_NAME = re.compile(rf"[^<>\n]{{1,{_LONGEST_NAME}}}")


class Qwen3CoderParser(ToolCallParser):
    """Such calls, anywhere, any number."""

    opening = "<tool_call>"
    closing = "</tool_call>"
    function = "<function="
    _END = "</function>"
    _PARAMETER = "<parameter="
    _VALUE_END = "</parameter>"

    def __init__(self, schemas: Schemas = MappingProxyType({})) -> None:
        super().__init__(schemas)
        self._tool = ""
        self._parameter = ""
        self._num_arguments = 0
        self._has_opening = False
        self._is_value_begun = False

    def finish(self) -> ParsedText:
        """See ``ToolCallParser``: a string that was cut off is part of its call all the same."""
        if self._state == self._read_string:
            self._write_string(self._held)
            self._held = ""
        return super().finish()

    def _read_text(self) -> bool:
        starts = [self._held.find(tag) for tag in (self.opening, self.function)]
        found = [start for start in starts if start >= 0]
        if found:
            self._release(min(found))
            self._state, self._is_after_call = self._read_head, False
            return True
        end = len(self._held) - max(overlap(self._held, t) for t in (self.opening, self.function))
        if not self._is_after_call or self._held[:end].strip():
            self._release(end)
        return False

    def _read_head(self) -> bool:
        """The tags before the first argument."""
        self._has_opening = self._held.startswith(self.opening)
        rest = self._held[len(self.opening) :].lstrip() if self._has_opening else self._held
        name = self._name_in(rest, self.function)
        if name is None:
            return False
        if not name:
            self._refuse()
            return True
        self._tool, self._num_arguments = name.strip(), 0
        self._name_call(self._tool, "{")
        self._held = rest[len(self.function) + len(name) + 1 :]
        self._state, self._is_after_call = self._read_inside, True
        return True

    def _name_in(self, text: str, tag: str) -> str | None:
        """The name in ``<tag=NAME>`` at a text's beginning; empty if there is no such tag, None if
        that can't be told yet."""
        if not text.startswith(tag):
            return None if tag.startswith(text) else ""
        name = _NAME.match(text, len(tag))
        end = len(tag) if name is None else name.end()
        if end == len(text) and end <= len(tag) + _LONGEST_NAME:
            return None
        if name is None or text[end] != ">" or not name[0].strip():
            return ""
        return name[0]

    def _refuse(self) -> None:
        tag = self.opening if self._has_opening else self.function
        self._emit(tag)
        self._held = self._held[len(tag) :]
        self._state = self._read_text

    def _read_inside(self) -> bool:
        """Up to the next argument or the call's end."""
        text = self._held.lstrip()
        for end in (self._END, self.closing):
            if text.startswith(end):
                self._write("}")
                self._held = text[len(end) :]
                self._state = self._read_end if end == self._END else self._read_text
                return True
        name = self._name_in(text, self._PARAMETER)
        if name is None or any(end.startswith(text) for end in (self._END, self.closing)):
            return False
        if not name:
            self._write("}")
            self._state = self._read_text
            return True
        self._parameter = name.strip()
        types = types_of(self._schemas.get(self._tool, {}), self._parameter)
        if types - {"string"}:
            self._state = self._read_value
            return self._read_value()
        self._held = text[len(self._PARAMETER) + len(name) + 1 :]
        self._write(self._key() + '"')
        self._state, self._is_value_begun = self._read_string, False
        return True

    def _read_end(self) -> bool:
        """The outer closing tag, if it is there."""
        text = self._held.lstrip()
        if text.startswith(self.closing):
            self._held = text[len(self.closing) :]
        elif self.closing.startswith(text):
            return False
        self._state = self._read_text
        return True

    def _read_value(self) -> bool:
        """An argument that is no string, with its tag: text, if it does not end."""
        end = self._held.find(self._VALUE_END)
        if end < 0:
            return False
        value = _unwrapped(self._held[self._held.index(">") + 1 : end])
        types = types_of(self._schemas.get(self._tool, {}), self._parameter)
        self._write(self._key() + encode_argument(value, types))
        self._held = self._held[end + len(self._VALUE_END) :]
        self._state = self._read_inside
        return True

    def _read_string(self) -> bool:
        if not self._is_value_begun:
            self._held = self._held.removeprefix("\n")
            self._is_value_begun = True
        end = self._held.find(self._VALUE_END)
        if end >= 0:
            self._write_string(self._held[:end].removesuffix("\n"))
            self._write('"')
            self._held = self._held[end + len(self._VALUE_END) :]
            self._state = self._read_inside
            return True
        end = len(self._held) - overlap(self._held, self._VALUE_END)
        end -= self._held[:end].endswith("\n")
        self._write_string(self._held[:end])
        self._held = self._held[end:]
        return False

    def _key(self) -> str:
        comma = ", " if self._num_arguments else ""
        self._num_arguments += 1
        return f"{comma}{json.dumps(self._parameter, ensure_ascii=False)}: "

    def _write_string(self, text: str) -> None:
        if text:
            self._write(json.dumps(text, ensure_ascii=False)[1:-1])

    def _write(self, arguments: str) -> None:
        self._calls.append(CallDelta(self.num_calls - 1, arguments=arguments))


def _unwrapped(value: str) -> str:
    """Without the line break on either side that the form puts there."""
    return value.removeprefix("\n").removesuffix("\n")
