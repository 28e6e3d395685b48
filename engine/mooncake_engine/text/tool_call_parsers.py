"""Finds tool calls in generated text while it arrives; one parser per format.

Hermes' format (Qwen, Hermes) puts each call between tags. In Llama 3's format the output consists
of calls only. Qwen3-Coder's format is not JSON: it has tags, and arguments without quotes. Anything
that is not a well-formed call stays text; all that a well-formed call removes from the text are its
tags, its field names and the white space around it. The result depends only on the text, not on how
it was split into pieces.

    <tool_call>
    <function=write_file>
    <parameter=path>
    notes.txt
    </parameter>
    </function>
    </tool_call>

In Qwen3-Coder's format the tool's schema determines the type of an argument. Strings are streamed
as they are generated, other arguments once they are complete. The outer tags may be missing, as
models forget them.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from mooncake_engine.text.argument_types import (
    encode_argument,
    is_unicode,
    to_json,
    types_of,
)

_CLOSING = {"{": "}", "[": "]"}


class ObjectScanner:
    """Finds the end of a JSON object by its brackets and strings. It does not validate anything
    else, and skips leading white space.

    Each character is read only once.
    """

    def __init__(self) -> None:
        self._open: list[str] = []
        self._is_in_string = False
        self._is_escaped = False
        self.is_complete = False
        self.is_broken = False

    def feed(self, text: str) -> int:
        """Read more text, up to the object's end or a character that can't be part of it.

        Returns:
            The number of characters that belong to the object. If that is fewer than were given,
            ``is_complete`` or ``is_broken`` is set.
        """
        for position, character in enumerate(text):
            if self._is_in_string:
                self._read_in_string(character)
            elif not self._read(character):
                self.is_broken = True
                return position
            if self.is_complete:
                return position + 1
        return len(text)

    def _read_in_string(self, character: str) -> None:
        if self._is_escaped:
            self._is_escaped = False
        elif character == "\\":
            self._is_escaped = True
        elif character == '"':
            self._is_in_string = False

    def _read(self, character: str) -> bool:
        """Process a character outside a string; returns whether it is valid there."""
        if not self._open and character != "{":
            return character.isspace()
        if character in _CLOSING:
            self._open.append(_CLOSING[character])
        elif character in "}]":
            if self._open.pop() != character:
                return False
            self.is_complete = not self._open
        elif character == '"':
            self._is_in_string = True
        return True


_HEAD = re.compile(
    r'\s*\{\s*"name"\s*:\s*(?P<name>"(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*'
    r"(?=\{)"
)
_MAX_HEAD_CHARACTERS = 1024
"""The most characters of a call's head. A call with a longer name is only found once complete."""
_ARGUMENTS = ("arguments", "parameters")


@dataclass(frozen=True, slots=True)
class CallDelta:
    """A part of a tool call.

    Args:
        index: the index of the call in its choice.
        name: the tool's name; set on the first delta of a call only.
        arguments: JSON to append to the call's arguments.
    """

    index: int
    name: str | None = None
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class ParsedText:
    """New final output: text outside of calls, parts of calls, and the reasoning before both."""

    content: str = ""
    calls: tuple[CallDelta, ...] = ()
    reasoning: str = ""


Schemas = Mapping[str, Mapping[str, Any]]
"""The JSON schema of each offered tool's parameters, by tool name."""


class ToolCallParser(ABC):
    """Separates calls from text. A state machine: ``_state`` is the method that reads next.

    ``opening`` and ``closing`` are the tags around a call. ``layout`` are the characters that have
    no meaning between two calls.

    Args:
        schemas: the tools' schemas, for formats that don't mark the types of arguments.
    """

    opening = ""
    closing = ""
    layout = " \t\r\n"
    special_tokens: tuple[str, ...] = ()
    """The format's special tokens, which must be kept in the text for the parser."""

    def __init__(self, schemas: Schemas = MappingProxyType({})) -> None:
        self.num_calls = 0
        self._schemas = schemas
        self._held = ""
        self._lead = ""  # text before a possible call; emitted if there turns out to be no call
        self._state: Callable[[], bool] = self._read_text
        self._tail: list[str] = []
        self._is_after_call = False
        self._content: list[str] = []
        self._calls: list[CallDelta] = []

    def push(self, text: str) -> ParsedText:
        """Parse more text; returns the parts that are now final."""
        self._held += text
        while self._held and self._state():
            pass
        return self._take()

    def finish(self) -> ParsedText:
        """End the text: an incomplete call that was held back becomes text."""
        is_layout = self._state == self._read_tail or self._is_after_call
        if not is_layout or self._held.strip(self.layout):
            self._emit(self._lead + self._held)
        self._held = self._lead = ""
        return self._take()

    @abstractmethod
    def _read_text(self) -> bool:
        """Read text up to the next call. Returns, like all states, whether parsing can continue
        without more text."""

    def _emit(self, text: str) -> None:
        """Emit text that is certainly not part of a call."""
        self._content.append(text)
        self._is_after_call = False

    def _release(self, end: int) -> None:
        """Emit the first ``end`` held characters as text; white space between two calls is
        dropped."""
        text, self._held = self._held[:end], self._held[end:]
        if not self._is_after_call or text.strip():
            self._emit(text)

    def _release_except(self, *tags: str) -> bool:
        """Emit the held text as ``_release`` does, except for a suffix that may be the start of one
        of the tags, and white space after a call. Returns False, as the state then needs more
        text."""
        end = len(self._held) - max(overlap(self._held, tag) for tag in tags)
        if not self._is_after_call or self._held[:end].strip():
            self._release(end)
        return False

    def _name_call(self, name: str, arguments: str = "") -> None:
        self._calls.append(CallDelta(self.num_calls, name, arguments))
        self.num_calls += 1
        self._lead = ""

    def _read_tail(self) -> bool:
        """Read the closing tags of a call; anything else is text."""
        if not self._tail:
            self._state, self._is_after_call = self._read_text, True
            return True
        text, wanted = self._held.lstrip(), self._tail[0]
        if text.startswith(wanted):
            self._held = text[len(wanted) :]
            del self._tail[0]
            return True
        if wanted.startswith(text):
            return False
        self._state = self._read_text
        return True

    def _take(self) -> ParsedText:
        parsed = ParsedText("".join(self._content), tuple(self._calls))
        self._content.clear()
        self._calls.clear()
        return parsed


class FirstCallParser:
    """Returns only the first call of an answer, as vLLM does if ``parallel_tool_calls`` is false.
    Text after that call is kept.

    Args:
        calls: the parser that finds all calls.
    """

    def __init__(self, calls: ToolCallParser) -> None:
        self._all = calls

    @property
    def special_tokens(self) -> tuple[str, ...]:
        """The format's special tokens, which must be kept in the text."""
        return self._all.special_tokens

    @property
    def num_calls(self) -> int:
        """The number of calls returned: 0 or 1."""
        return min(self._all.num_calls, 1)

    def push(self, text: str) -> ParsedText:
        """Parse more text; returns the parts that are now final."""
        return self._first(self._all.push(text))

    def finish(self) -> ParsedText:
        """End the text; returns the parts that were held back."""
        return self._first(self._all.finish())

    @staticmethod
    def _first(parsed: ParsedText) -> ParsedText:
        calls = tuple(delta for delta in parsed.calls if delta.index == 0)
        return replace(parsed, calls=calls)


class JsonCallParser(ToolCallParser):
    """Parses calls that are JSON objects with a name and arguments. An object with other fields,
    except ``ignored_fields``, is not a call."""

    ignored_fields: frozenset[str] = frozenset()

    def __init__(self, schemas: Schemas = MappingProxyType({})) -> None:
        super().__init__(schemas)
        self._scanner = ObjectScanner()
        self._start = self._num_scanned = 0

    @abstractmethod
    def _reject(self) -> None:
        """Turn ``_held``, which starts like a call but is none, or its start into text."""

    def _begin_call(self, start: int = 0) -> bool:
        """Start to read a call, which follows a tag of ``start`` characters in ``_held``."""
        self._scanner, self._start, self._num_scanned = ObjectScanner(), start, start
        self._is_after_call = False
        self._state = self._read_head
        return True

    def _read_head(self) -> bool:
        """Read up to the arguments, or to the end of the call if its fields are in another
        order."""
        head = _HEAD.match(self._held[: self._start + _MAX_HEAD_CHARACTERS], self._start)
        if head is not None and (name := _loads(head["name"])) is not None and is_unicode(name):
            self._name_call(name)
            self._held = self._held[head.end() :]
            self._scanner, self._state = ObjectScanner(), self._read_arguments
            return True
        return self._scan_whole()

    def _scan_whole(self) -> bool:
        """Read to the end of an object whose fields are not in the usual order."""
        self._num_scanned += self._scanner.feed(self._held[self._num_scanned :])
        if self._scanner.is_broken:
            self._reject()
            return True
        if not self._scanner.is_complete:
            return False
        call = _whole_call(self._held[self._start : self._num_scanned], self.ignored_fields)
        if call is None:
            self._reject()
            return True
        self._name_call(call[0])
        self._calls.append(CallDelta(self.num_calls - 1, arguments=call[1]))
        self._held = self._held[self._num_scanned :]
        return self._end_call([])

    def _read_arguments(self) -> bool:
        count = self._scanner.feed(self._held)
        self._calls.append(CallDelta(self.num_calls - 1, arguments=self._held[:count]))
        self._held = self._held[count:]
        if self._scanner.is_complete:
            return self._end_call(["}"])
        if self._scanner.is_broken:
            self._state = self._read_text
            return True
        return False

    def _end_call(self, missing: list[str]) -> bool:
        self._tail = [*missing, self.closing] if self.closing else missing
        self._state = self._read_tail
        return True


class HermesParser(JsonCallParser):
    """Parses ``<tool_call>{"name": …, "arguments": {…}}</tool_call>``, any number of times and
    anywhere in the text."""

    opening = "<tool_call>"
    closing = "</tool_call>"
    special_tokens = (opening, closing)  # in some models; in Qwen's they are ordinary

    def _read_text(self) -> bool:
        start = self._held.find(self.opening)
        if start >= 0:
            self._release(start)
            return self._begin_call(len(self.opening))
        return self._release_except(self.opening)

    def _reject(self) -> None:
        self._emit(self.opening)
        self._held = self._held[len(self.opening) :]
        self._state = self._read_text


class Llama3Parser(JsonCallParser):
    """Parses an output that consists of ``{"name": …, "parameters": {…}}``, separated by ``;`` or
    white space.

    The tag before the calls is a special token, which is normally not part of the text.
    """

    layout = " \t\r\n;"
    _TAG = "<|python_tag|>"

    def _read_text(self) -> bool:
        rest = self._held.lstrip(self.layout if self.num_calls else None)
        if rest.startswith(self._TAG):
            rest = rest[len(self._TAG) :].lstrip()
        if rest.startswith("{"):
            self._lead = self._held[: len(self._held) - len(rest)]
            self._held = rest
            return self._begin_call()
        if not rest or self._TAG.startswith(rest):
            return False
        self._state = self._read_rest
        return True

    def _reject(self) -> None:
        self._held, self._lead = self._lead + self._held, ""
        self._state = self._read_rest

    def _read_rest(self) -> bool:
        """Emit everything up to the end as text: calls can only come first."""
        self._emit(self._held)
        self._held = ""
        return False


def _whole_call(text: str, ignored: frozenset[str]) -> tuple[str, str] | None:
    """Name and arguments of a complete call, with its fields in any order; None if it is none."""
    call = _loads(text, dict)
    if call is None or len(call.keys() - ignored) != 2:
        return None
    name = call.get("name")
    if not (isinstance(name, str) and is_unicode(name)):
        return None
    arguments = next((call[field] for field in _ARGUMENTS if field in call), None)
    if not isinstance(arguments, dict):
        return None
    return name, to_json(arguments)


def _loads(text: str, kind: type = str) -> Any:
    """The JSON value of a text if it has the type ``kind``, otherwise None."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, kind) else None


def overlap(text: str, tag: str) -> int:
    """The number of characters at the end of the text that may be the start of the tag."""
    for length in range(min(len(tag) - 1, len(text)), 0, -1):
        if text.endswith(tag[:length]):
            return length
    return 0


_MAX_NAME_CHARACTERS = 1024
_NAME = re.compile(rf"[^<>\n]{{1,{_MAX_NAME_CHARACTERS}}}")


class Qwen3CoderParser(ToolCallParser):
    """Parses Qwen3-Coder's calls (see the module's docstring), any number of times and anywhere in
    the text."""

    opening = "<tool_call>"
    closing = "</tool_call>"
    special_tokens = (opening, closing)
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
        """End the text. A string argument that was cut off is still part of its call."""
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
        return self._release_except(self.opening, self.function)

    def _read_head(self) -> bool:
        """Read the tags before the first argument."""
        self._has_opening = self._held.startswith(self.opening)
        rest = self._held[len(self.opening) :].lstrip() if self._has_opening else self._held
        name = self._name_in(rest, self.function)
        if name is None:
            return False
        if not name:
            self._reject()
            return True
        self._tool, self._num_arguments = name.strip(), 0
        self._name_call(self._tool, "{")
        self._held = rest[len(self.function) + len(name) + 1 :]
        self._state, self._is_after_call = self._read_inside, True
        return True

    def _name_in(self, text: str, tag: str) -> str | None:
        """The name in ``<tag=NAME>`` at the start of a text; an empty string if there is no such
        tag, None if more text is needed to decide."""
        if not text.startswith(tag):
            return None if tag.startswith(text) else ""
        name = _NAME.match(text, len(tag))
        end = len(tag) if name is None else name.end()
        if end == len(text) and end <= len(tag) + _MAX_NAME_CHARACTERS:
            return None
        if name is None or text[end] != ">" or not name[0].strip():
            return ""
        return name[0]

    def _reject(self) -> None:
        tag = self.opening if self._has_opening else self.function
        self._emit(tag)
        self._held = self._held[len(tag) :]
        self._state = self._read_text

    def _read_inside(self) -> bool:
        """Read up to the next argument or the end of the call."""
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
        """Read the outer closing tag, which may be missing."""
        text = self._held.lstrip()
        if text.startswith(self.closing):
            self._held = text[len(self.closing) :]
        elif self.closing.startswith(text):
            return False
        self._state = self._read_text
        return True

    def _read_value(self) -> bool:
        """Read an argument that is not a string, with its tags. If it never ends, it becomes
        text."""
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
    """The value without the line break that the format adds on each side."""
    return value.removeprefix("\n").removesuffix("\n")
