"""Reads traces for the simulator: Mooncake's JSON lines, optionally with sessions or deltas."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import msgspec

from mooncake_conductor.errors import InvalidTrace

_Count = Annotated[int, msgspec.Meta(ge=1)]
_SESSION_KEYS = 1 << 62
"""First key of chunks that sessions generate; the trace's own keys are smaller."""
_MAX_SESSION_CHUNKS = 1 << 20


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace.

    Args:
        at_s: arrival time, in seconds from the trace's start; a later turn of a session arrives
            ``delay_s`` after the end of the previous turn instead.
        num_input: tokens of the prompt.
        num_output: tokens of the answer.
        keys: keys of the prompt's full chunks.
        session: the session of which it is a turn; None: a single request.
        delay_s: seconds between the end of the previous turn and this one.
    """

    at_s: float
    num_input: int
    num_output: int
    keys: tuple[int, ...]
    session: str | None = None
    delay_s: float = 0.0


class _Line(msgspec.Struct):
    input_length: _Count | None = None
    output_length: _Count | None = None
    timestamp: float | None = None
    hash_ids: tuple[int, ...] = ()
    session_id: str | int | None = None
    delay: float | None = None
    delay_ms: float | None = None
    created_time: float | None = None
    input_tokens: _Count | None = None
    output_tokens: _Count | None = None


def read_trace(
    path: Path, *, chunk_tokens: int = 512, is_delta: bool = False
) -> list[TraceRequest]:
    """Read all requests, sorted by time; turns of a session keep their order.

    Args:
        path: a file of JSON lines. Times are in milliseconds from any origin, and are shifted so
            that the first request is at 0. A turn without a time follows the previous turn of its
            session.
        chunk_tokens: tokens per hash id of the trace.
        is_delta: later turns of a session contain only new tokens; their prompt is the whole
            conversation so far plus these.

    Raises:
        InvalidTrace: the file can't be read, or a line is no request; the error names the line.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as exc:
        raise InvalidTrace(f"can't read the trace {path}: {exc.strerror}") from exc
    found: list[TraceRequest] = []
    latest: dict[str, float] = {}
    for number, line in enumerate(lines, 1):
        if line.strip():
            request = _request(path, number, line, chunk_tokens, latest)
            found.append(request)
            if request.session is not None:
                latest[request.session] = request.at_s
    if not found:
        raise InvalidTrace(f"the trace {path} holds no request")
    begin = min(request.at_s for request in found)
    found = [replace(request, at_s=request.at_s - begin) for request in found]
    found.sort(key=lambda request: request.at_s)
    return _accumulated(found, chunk_tokens) if is_delta else found


def scaled(requests: Sequence[TraceRequest], load: float) -> list[TraceRequest]:
    """Scale the arrival rate of the requests by ``load``."""
    return [replace(request, at_s=request.at_s / load) for request in requests]


def at_random(
    requests: Sequence[TraceRequest], per_s: float, rng: random.Random
) -> list[TraceRequest]:
    """Replace the arrival times by a Poisson process of `per_s` requests per second.

    The order stays the same. Traces themselves have bursts and rounded times.
    """
    found, at_s = [], 0.0
    for request in requests:
        at_s += rng.expovariate(per_s)
        found.append(replace(request, at_s=at_s))
    return found


def _request(
    path: Path, number: int, line: bytes, chunk_tokens: int, latest: dict[str, float]
) -> TraceRequest:
    try:
        entry = msgspec.json.decode(line, type=_Line)
    except (msgspec.ValidationError, msgspec.DecodeError) as exc:
        raise InvalidTrace(f"{path}:{number} is no request of a Mooncake trace: {exc}") from exc
    num_input = entry.input_length or entry.input_tokens
    num_output = entry.output_length or entry.output_tokens
    if num_input is None or num_output is None:
        raise InvalidTrace(f"{path}:{number} lacks input_length or output_length")
    at_ms = entry.timestamp if entry.timestamp is not None else entry.created_time
    delay_ms = entry.delay if entry.delay is not None else entry.delay_ms or 0.0
    session = None if entry.session_id is None else str(entry.session_id)
    at_s = latest.get(session or "", 0.0) if at_ms is None else at_ms / 1000
    keys = entry.hash_ids[: num_input // chunk_tokens]
    return TraceRequest(at_s, num_input, num_output, keys, session, delay_ms / 1000)


def replicated(
    requests: Sequence[TraceRequest], num_copies: int, rng: random.Random, spread_s: float = 60.0
) -> list[TraceRequest]:
    """Replicate the users of a trace. Copies share no chunks and no sessions with each other.

    All copies but the first are delayed by a random time of at most ``spread_s`` seconds.
    """
    span = 1 + max((key for request in requests for key in request.keys), default=0)
    found = list(requests)
    for number in range(1, num_copies):
        later = rng.uniform(0.0, spread_s)
        named: dict[int, int] = {}  # prompts share one int object per key, to save memory
        for request in requests:
            keys = tuple(named.setdefault(key, key + number * span) for key in request.keys)
            session = None if request.session is None else f"{request.session}/{number}"
            found.append(replace(request, at_s=request.at_s + later, keys=keys, session=session))
    found.sort(key=lambda request: request.at_s)
    return found


def _accumulated(requests: list[TraceRequest], chunk_tokens: int) -> list[TraceRequest]:
    """Expand delta turns to their whole prompts: a session's tokens are one growing sequence."""
    said: dict[str, int] = {}
    first: dict[str, tuple[int, tuple[int, ...]]] = {}
    whole = []
    for request in requests:
        if request.session is None:
            whole.append(request)
            continue
        session = request.session
        before = said.get(session, 0)
        number, own = first.setdefault(session, (len(first), request.keys))
        num_input = before + request.num_input
        base = _SESSION_KEYS + number * _MAX_SESSION_CHUNKS
        new_keys = tuple(base + at for at in range(len(own), num_input // chunk_tokens))
        said[session] = num_input + request.num_output
        whole.append(replace(request, num_input=num_input, keys=own + new_keys))
    return whole
