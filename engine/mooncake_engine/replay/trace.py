"""Traces of requests: Mooncake's (one JSON object per line), or conversations of ShareGPT."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec

from mooncake_engine.errors import ConfigError

_CHARACTERS_PER_TOKEN = 4


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace.

    Args:
        at_s: when it came, in seconds from the trace's beginning; None where the trace has no
            times.
        num_input, num_output: tokens of prompt and answer.
        block_ids: names of the prompt's blocks; equal names stand for equal content.
        text: the prompt itself, where the trace has it.
    """

    at_s: float | None
    num_input: int
    num_output: int
    block_ids: tuple[int, ...] = ()
    text: str | None = None


_Count = Annotated[int, msgspec.Meta(ge=1)]


class _MooncakeLine(msgspec.Struct):
    """As of Mooncake's published traces; times in milliseconds."""

    timestamp: float
    input_length: _Count
    output_length: _Count
    hash_ids: tuple[int, ...] = ()


class _Turn(msgspec.Struct):
    speaker: str = msgspec.field(name="from")
    value: str


class _Conversation(msgspec.Struct):
    conversations: list[_Turn] = msgspec.field(default_factory=list)


def read_trace(path: Path) -> list[TraceRequest]:
    """All requests of a trace, in the order of their times.

    Raises:
        ConfigError: no such file, or a line that is no request.
    """
    try:
        content = path.read_bytes()
    except OSError as exc:
        raise ConfigError(f"can't read the trace {path}: {exc.strerror}") from exc
    read: Callable[[bytes], Iterable[TraceRequest]] = (
        _share_gpt if content.lstrip().startswith(b"[") else _mooncake
    )
    try:
        requests = list(read(content))
    except (msgspec.ValidationError, msgspec.DecodeError) as exc:
        raise ConfigError(f"{path} is no trace of Mooncake's or ShareGPT's form: {exc}") from exc
    if not requests:
        raise ConfigError(f"the trace {path} holds no request")
    return sorted(requests, key=lambda request: request.at_s or 0.0)


def _mooncake(content: bytes) -> Iterable[TraceRequest]:
    for line in content.splitlines():
        if line.strip():
            entry = msgspec.json.decode(line, type=_MooncakeLine)
            at_s = entry.timestamp / 1000
            yield TraceRequest(at_s, entry.input_length, entry.output_length, entry.hash_ids)


def _share_gpt(content: bytes) -> Iterable[TraceRequest]:
    """The first question and answer of each conversation; the others have neither."""
    for conversation in msgspec.json.decode(content, type=list[_Conversation]):
        question, answer, *_ = [*conversation.conversations, None, None]
        if question is None or answer is None or question.speaker not in ("human", "user"):
            continue
        num_input, num_output = (_num_tokens(turn.value) for turn in (question, answer))
        yield TraceRequest(None, num_input, num_output, text=question.value)


def _num_tokens(text: str) -> int:
    return max(1, len(text) // _CHARACTERS_PER_TOKEN)
