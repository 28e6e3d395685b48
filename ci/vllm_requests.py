"""Requests to instances that serve the example model, and functions that read the answers."""

from __future__ import annotations

import json
import random
import re
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Generator
from dataclasses import dataclass

from vllm_serving import Json

# The first answer is slow on a busy machine, because kernels are compiled.
ANSWER_TIMEOUT_S = 600
STREAM_TIMEOUT_S = 300.0
METRICS_TIMEOUT_S = 60.0
NUM_TOKENS = 16
FREED_S = 120.0
"""Seconds within which blocks must be free again; covers leases, and machines with other load."""
COMPLETIONS = "/v1/completions"


def tokens(length: int, seed: int = 0) -> list[int]:
    """A prompt of printable bytes."""
    return random.Random(f"{length}/{seed}").choices(range(32, 123), k=length)


def completion(prompt: list[int], **fields: object) -> Json:
    """A greedy completion."""
    base: Json = {"model": "tiny", "temperature": 0, "max_tokens": NUM_TOKENS}
    return base | {"prompt": prompt, "return_token_ids": True} | fields


def without_token_ids(body: Json) -> Json:
    """The same request without token ids, answered with text only."""
    return {key: value for key, value in body.items() if key != "return_token_ids"}


def post(url: str, path: str, body: Json) -> Json:
    """Send a request; returns the response's JSON, or ``{"error": ...}`` with its status."""
    request = urllib.request.Request(
        url + path, json.dumps(body).encode(), {"content-type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=ANSWER_TIMEOUT_S) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        return {"error": f"{error.code} {error.read().decode('utf-8', 'replace')}"}


def token_ids(answer: Json) -> object:
    """Every choice's token ids, or the whole answer if it has none."""
    choices = answer.get("choices")
    return [choice["token_ids"] for choice in choices] if choices else answer


def ask(
    url: str, path: str, body: Json, begun: Callable[[], object] | None = None
) -> tuple[str, str]:
    """Send a request; returns text and finish reason.

    Args:
        url, path, body: the request.
        begun: called when the response's first line has arrived, before the rest is read.
    """
    request = urllib.request.Request(
        url + path, json.dumps(body).encode(), {"content-type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=ANSWER_TIMEOUT_S) as answer:
            first = answer.readline()
            if begun is not None:
                begun()
            content = (first + answer.read()).decode()
    except urllib.error.HTTPError as error:
        return f"{error.code} {error.read().decode('utf-8', 'replace')}", "error"
    if not body.get("stream"):
        return joined([json.loads(content)])
    *events, last = [block.removeprefix("data: ") for block in content.split("\n\n") if block]
    return joined([json.loads(event) for event in events]) if last == "[DONE]" else (last, "error")


def timed_choices(url: str, body: Json) -> Generator[tuple[float, Json], None, None]:
    """Send a streaming completion; yields each event's choice, empty if it has none, with the time
    of its arrival by ``time.perf_counter``. Closing the iterator disconnects."""
    request = urllib.request.Request(
        url + COMPLETIONS, json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=STREAM_TIMEOUT_S) as answer:
        for line in answer:
            if line.startswith(b"data: {"):
                now = time.perf_counter()
                choices: list[Json] = json.loads(line[6:]).get("choices") or [{}]
                yield now, choices[0]


def joined(chunks: list[Json]) -> tuple[str, str]:
    """Text and finish reason of a streamed answer's chunks."""
    text, finish = "", ""
    for choice in (choice for chunk in chunks for choice in chunk.get("choices", ())):
        piece = choice.get("text") or (choice.get("message") or choice.get("delta") or {}).get(
            "content"
        )
        text += piece or ""
        finish = choice.get("finish_reason") or finish
    return text, finish


@dataclass
class Stream:
    """What a client has received of a stream."""

    text: str = ""
    has_ended: bool = False
    error: str = ""


def follow(
    url: str, body: Json, stream: Stream, started: threading.Event, timeout_s: float
) -> Stream:
    """Request a stream of completions, and read it until it ends or fails."""
    request = urllib.request.Request(
        url + COMPLETIONS,
        json.dumps(body | {"stream": True}).encode(),
        {"content-type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            for line in answer:
                take_line(line, stream)
                started.set()
    except (OSError, ValueError, urllib.error.HTTPError) as exc:
        stream.error = stream.error or repr(exc)
    if not stream.has_ended and not stream.error:
        stream.error = "the stream was cut off"
    return stream


def take_line(line: bytes, stream: Stream) -> None:
    """Process one line of server-sent events."""
    data = line.removeprefix(b"data: ").strip()
    if data == b"[DONE]":
        stream.has_ended = True
    elif data.startswith(b"{"):
        event = json.loads(data)
        if "error" in event:
            stream.error = str(event["error"])
        for choice in event.get("choices", ()):
            stream.text += choice.get("text") or ""
            if choice.get("finish_reason") in ("error", "abort"):
                stream.error = str(choice["finish_reason"])


def figure(url: str, name: str) -> float:
    """A metric of a /metrics page, summed over all labels."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=METRICS_TIMEOUT_S) as answer:
        lines = answer.read().decode().splitlines()
    pattern = re.compile(rf"{re.escape(name)}(\{{.*\}})? ([0-9.e+]+)$")
    return sum(float(found[2]) for line in lines if (found := pattern.match(line)))


def until_equal(url: str, name: str, wanted: float) -> float:
    """Wait until a metric has this value, or a timeout; returns it. vLLM updates metrics per
    step."""
    deadline = time.monotonic() + FREED_S
    while (value := figure(url, name)) != wanted and time.monotonic() < deadline:
        time.sleep(0.5)
    return value


def until_zero(url: str, name: str) -> float:
    """Wait until a gauge is 0, or a timeout; returns it."""
    return until_equal(url, name, 0.0)
