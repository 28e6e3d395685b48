"""Reads traces of requests from files, generates their prompts, and determines when each request is
sent."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated

import msgspec

from mooncake_engine.errors import ConfigError

_CHARACTERS_PER_TOKEN = 4


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace.

    Args:
        at_s: when the request arrived, in seconds from the start of the trace; None if the trace
            has no times.
        num_input, num_output: tokens of prompt and answer.
        block_ids: ids of the prompt's blocks; equal ids stand for equal content.
        text: the prompt itself; None if the trace has none.
    """

    at_s: float | None
    num_input: int
    num_output: int
    block_ids: tuple[int, ...] = ()
    text: str | None = None


_Count = Annotated[int, msgspec.Meta(ge=1)]


class _MooncakeLine(msgspec.Struct):
    """A line of Mooncake's published traces; times in milliseconds."""

    timestamp: float
    input_length: _Count
    output_length: _Count
    hash_ids: tuple[int, ...] = ()


class _Turn(msgspec.Struct):
    speaker: str = msgspec.field(name="from")
    value: str


class _Conversation(msgspec.Struct):
    conversations: list[_Turn] = msgspec.field(default_factory=list)


class _LEvalLine(msgspec.Struct):
    """A document of L-Eval (arXiv 2307.11088) with questions about it and their answers."""

    document: str = msgspec.field(name="input")
    instructions: list[str]
    outputs: list[str]


class _ArxivLine(msgspec.Struct):
    """A paper of ArXiv-Summarization (Cohan et al. 2018) and its abstract."""

    article: str
    abstract: str


def read_trace(path: Path) -> list[TraceRequest]:
    """Read all requests of a trace, sorted by time.

    Raises:
        ConfigError: the file can't be read, has an unknown format, or holds no request.
    """
    try:
        content = path.read_bytes()
    except OSError as exc:
        raise ConfigError(f"can't read the trace {path}: {exc.strerror}") from exc
    try:
        requests = list(_requests_in(content))
    except (msgspec.ValidationError, msgspec.DecodeError) as exc:
        formats = "Mooncake's, ShareGPT's, L-Eval's or ArXiv-Summarization's"
        raise ConfigError(f"{path} is not a trace in {formats} format: {exc}") from exc
    if not requests:
        raise ConfigError(f"the trace {path} contains no requests")
    return sorted(requests, key=lambda request: request.at_s or 0.0)


def _requests_in(content: bytes) -> Iterable[TraceRequest]:
    """Parse the content; its format is detected from the first character and from the fields of the
    first line."""
    if content.lstrip().startswith(b"["):
        yield from _share_gpt(content)
        return
    read: Callable[[bytes], Iterable[TraceRequest]] | None = None
    for line in content.splitlines():
        if not line.strip():
            continue
        if read is None:
            fields = msgspec.json.decode(line, type=dict[str, msgspec.Raw])
            read = next((parse for name, parse in _PARSERS.items() if name in fields), _mooncake)
        yield from read(line)


def _mooncake(line: bytes) -> Iterable[TraceRequest]:
    entry = msgspec.json.decode(line, type=_MooncakeLine)
    at_s = entry.timestamp / 1000
    yield TraceRequest(at_s, entry.input_length, entry.output_length, entry.hash_ids)


def _l_eval(line: bytes) -> Iterable[TraceRequest]:
    """One request per question. The document comes first, so that the prompts share a prefix."""
    entry = msgspec.json.decode(line, type=_LEvalLine)
    for instruction, output in zip(entry.instructions, entry.outputs, strict=False):
        yield _of_texts(f"{entry.document}\n\n{instruction}", output)


def _arxiv(line: bytes) -> Iterable[TraceRequest]:
    entry = msgspec.json.decode(line, type=_ArxivLine)
    yield _of_texts(f"{entry.article}\n\nSummarize this paper.", entry.abstract)


_PARSERS: dict[str, Callable[[bytes], Iterable[TraceRequest]]] = {
    "instructions": _l_eval,
    "article": _arxiv,
}
"""The parser of each line format, by a field that only this format has."""


def _share_gpt(content: bytes) -> Iterable[TraceRequest]:
    """The first question and answer of each conversation; conversations without both are
    skipped."""
    for conversation in msgspec.json.decode(content, type=list[_Conversation]):
        question, answer, *_ = [*conversation.conversations, None, None]
        if question is None or answer is None or question.speaker not in ("human", "user"):
            continue
        yield _of_texts(question.value, answer.value)


def _of_texts(prompt: str, answer: str) -> TraceRequest:
    return TraceRequest(None, _num_tokens(prompt), _num_tokens(answer), text=prompt)


def _num_tokens(text: str) -> int:
    return max(1, len(text) // _CHARACTERS_PER_TOKEN)


_WORDS = (
    *("time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world"),
    *("school", "state", "family", "student", "group", "country", "problem", "hand", "part"),
    *("place", "case", "week", "company", "system", "program", "question", "work", "number"),
    *("night", "point", "home", "water", "room", "mother", "area", "money", "story", "fact"),
    *("month", "lot", "right", "study", "book", "eye", "job", "word", "business", "issue", "side"),
)


@dataclass(frozen=True, slots=True)
class PromptWriter:
    """Generates prompts from common English words.

    Args:
        tokens_per_word: tokens per word of the model's tokenizer.
        block_tokens: tokens that one block id of the trace stands for.
    """

    tokens_per_word: float = 1.0
    block_tokens: int = 512

    def write(self, request: TraceRequest, index: int) -> str:
        """The prompt of request number ``index``. Prompts share a prefix as far as their block ids
        are equal. Blocks without an id have unique content."""
        if request.text is not None:
            return request.text
        num_words = max(1, round(request.num_input / self.tokens_per_word))
        per_block = max(1, round(self.block_tokens / self.tokens_per_word))
        words: list[str] = []
        for position in range(-(-num_words // per_block)):
            named = position < len(request.block_ids)
            name = request.block_ids[position] if named else f"{index}/{position}"
            words += _block(str(name), per_block)
        return " ".join(words[:num_words])


@lru_cache(maxsize=1024)
def _block(name: str, num_words: int) -> list[str]:
    return random.Random(f"block {name}").choices(_WORDS, k=num_words)


def probe_text(num_words: int, seed: str) -> str:
    """A text of the same words, to measure tokens per word."""
    return " ".join(random.Random(seed).choices(_WORDS, k=num_words))


@dataclass(frozen=True, slots=True)
class Pacing:
    """When a trace's requests are sent; by default at the trace's own times.

    Args:
        speedup: factor by which the trace's times are divided.
        rate: requests per second, sent at random times (Poisson) instead of the trace's.
        concurrency: number of requests to keep in flight, instead of following any times.
        seed: the seed of the random times.

    Raises:
        ConfigError: a value is out of range, or two options exclude each other.
    """

    speedup: float = 1.0
    rate: float | None = None
    concurrency: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("speedup", "rate", "concurrency"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"--{name} must be more than 0, got {value}")
        if sum((self.speedup != 1.0, self.rate is not None, self.concurrency is not None)) > 1:
            raise ConfigError("--speedup, --rate and --concurrency exclude each other")

    def times_s(self, requests: Sequence[TraceRequest]) -> list[float]:
        """When each request is sent, in seconds from the start.

        Raises:
            ConfigError: the trace has no times, and neither rate nor concurrency is given.
        """
        if self.concurrency is not None:
            return [0.0] * len(requests)
        if self.rate is not None:
            numbers, now, times = random.Random(self.seed), 0.0, []
            for _ in requests:
                times.append(now)
                now += numbers.expovariate(self.rate)
            return times
        own = [request.at_s for request in requests if request.at_s is not None]
        if len(own) < len(requests):
            raise ConfigError("the trace has no times: use --rate or --concurrency")
        return [(at_s - own[0]) / self.speedup for at_s in own]
