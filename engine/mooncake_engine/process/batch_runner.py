"""``mooncake-engine run-batch``: sends a file of requests, as batch work.

The files have the format of OpenAI's batch files: one line of JSON per request, one per result. The
same command resumes a run that was interrupted: requests that the result file answers are skipped.
"""

from __future__ import annotations

import http.client
import json
import os
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from mooncake_api.instance_protocol import BATCH_PRIORITY
from mooncake_api.request_body import DECODE_ERRORS
from mooncake_engine.config_checks import check_url
from mooncake_engine.errors import ConfigError, EngineError
from mooncake_hal.session.listener import hang_up, tune

ENDPOINTS = ("/v1/completions", "/v1/chat/completions")
_RETRIED_STATUSES = (429, 503)
"""Statuses with which a server rejects requests for the time being; these are retried."""
_MIN_PAUSE_S, _MAX_PAUSE_S = 1.0, 60.0
"""Bounds of the pause between two attempts, which doubles each time, in seconds."""
_CONNECT_S = 60.0


class BatchFailed(EngineError):
    """Some requests of a batch failed, and the result file says why; or that file can't be written
    any more."""


class _RunEnded(Exception):
    """The run ends before this request has its result."""


class _Line(msgspec.Struct):
    """A line of the input file: one request, in the format of OpenAI's batch files."""

    custom_id: str
    url: str
    body: dict[str, Any]
    method: str = "POST"


_RESULT_START = b'{"id":"batch_req_'
"""The first bytes of a result: by them a file that was torn within its first one is recognised."""


class _Result(msgspec.Struct):
    """The fields of a result that are read back to resume a run."""

    custom_id: str
    response: dict[str, Any] | None

    @property
    def is_answered(self) -> bool:
        return (self.response or {}).get("status_code") == 200


@dataclass(frozen=True, slots=True)
class BatchRun:
    """A batch to run.

    Args:
        url: URL of the server, with or without ``/v1``.
        input_file, output_file: file of requests, and file to which results are appended.
        concurrency: maximum number of requests in flight.
        max_attempts: maximum number of attempts per request, not counting those that the server
            rejects for the time being.
        headers: HTTP headers of every request.
        pause: sleeps for a number of seconds between attempts; by default until the run ends, at
            most.
    """

    url: str
    input_file: Path
    output_file: Path
    concurrency: int = 32
    max_attempts: int = 5
    headers: dict[str, str] = field(default_factory=dict)
    pause: Callable[[float], object] | None = None

    def __post_init__(self) -> None:
        check_url("--url", self.url)
        for flag, value in (
            ("--concurrency", self.concurrency),
            ("--max-attempts", self.max_attempts),
        ):
            if value < 1:
                raise ConfigError(f"{flag} must be at least 1, got {value}")


def run_batch(batch: BatchRun, on_progress: Callable[[str, float], None]) -> str:
    """Send the requests that have no answer yet; returns a summary for the user.

    Raises:
        ConfigError: a file is invalid or can't be accessed; nothing was sent.
        BatchFailed: some requests failed, or a result can't be written, which ends the run.
    """
    lines = _read_requests(batch.input_file)
    answered = _read_answered(batch.output_file)
    left = [line for line in lines if line.custom_id not in answered]
    num_done = num_failed = 0
    lock = threading.Lock()
    client = _Client(batch)
    # Unbuffered: each result is kept if the run is interrupted, and what could not be written is
    # not tried again when the file is closed.
    with FileIO(batch.output_file, "ab") as results, ThreadPoolExecutor(batch.concurrency) as pool:

        def one(line: _Line) -> None:
            nonlocal num_done, num_failed
            result = client.serve(line)
            with lock:
                _append(results, msgspec.json.encode(result) + b"\n", batch.output_file)
                num_done += 1
                num_failed += not _is_answered(result)
                on_progress("running the batch", num_done / len(left))

        try:
            ended, _ = wait([pool.submit(one, line) for line in left], None, FIRST_EXCEPTION)
            for each in ended:
                each.result()
        finally:  # what is still queued or in flight could not be recorded
            client.close()
            pool.shutdown(cancel_futures=True)
    summary = (
        f"{len(left)} requests sent, {num_failed} of them failed; "
        f"{len(lines) - len(left)} had been answered before: {batch.output_file}"
    )
    if num_failed:
        raise BatchFailed(f"{summary}; run the command again to try those that failed")
    return summary


def _is_answered(result: dict[str, Any]) -> bool:
    return bool(result["response"] and result["response"]["status_code"] == 200)


def _read_requests(path: Path) -> list[_Line]:
    """Reads all requests.

    Raises:
        ConfigError: the file can't be read, or a line is no valid request.
    """
    try:
        content = path.read_bytes()
    except OSError as exc:
        raise ConfigError(f"can't read --input-file {path}: {exc.strerror}") from exc
    lines: dict[str, _Line] = {}
    for number, text in enumerate(content.splitlines(), 1):
        if not text.strip():
            continue
        try:
            line = msgspec.json.decode(text, type=_Line)
        except DECODE_ERRORS as exc:
            raise ConfigError(f"{path}, line {number} is no valid batch request: {exc}") from exc
        for problem in _problems(line, lines):
            raise ConfigError(f"{path}, line {number} ({line.custom_id}): {problem}")
        lines[line.custom_id] = line
    if not lines:
        raise ConfigError(f"--input-file {path} contains no requests")
    return list(lines.values())


def _problems(line: _Line, known: dict[str, _Line]) -> Iterator[str]:
    if line.custom_id in known:
        yield "its custom_id is not unique in the file"
    if line.method != "POST" or line.url not in ENDPOINTS:
        yield f"wanted POST to {' or '.join(ENDPOINTS)}, got {line.method} {line.url}"
    if line.body.get("stream"):
        yield "streaming is not supported in a batch: leave stream out"


def _read_answered(path: Path) -> set[str]:
    """Returns the ids of requests that have an answer. Removes a last line that is incomplete
    because the run was interrupted.

    Raises:
        ConfigError: the file can't be accessed, or a line is no result.
    """
    try:
        content = path.read_bytes() if path.exists() else b""
        whole, newline, torn = content.rpartition(b"\n")
        found = [msgspec.json.decode(line, type=_Result) for line in whole.splitlines()]
        if not found and not torn.startswith(_RESULT_START[: len(torn)]):
            raise ConfigError(
                f"--output-file {path} has a line that is no result; use another file"
            )
        with path.open("ab") as results:
            results.truncate(len(whole) + len(newline))
    except OSError as exc:
        raise ConfigError(f"can't write --output-file {path}: {exc.strerror}") from exc
    except DECODE_ERRORS as exc:
        raise ConfigError(
            f"--output-file {path} has a line that is no result: {exc}; use another file"
        ) from exc
    return {result.custom_id for result in found if result.is_answered}


def _append(results: FileIO, line: bytes, path: Path) -> None:
    """Append a whole line, or nothing of it.

    Raises:
        BatchFailed: the file can't be written.
    """
    end = os.fstat(results.fileno()).st_size
    try:
        while line:  # the last bytes that fit on a full disk are written without an error
            line = line[results.write(line) :]
    except OSError as exc:
        results.truncate(end)
        raise BatchFailed(
            f"can't write --output-file {path}: {exc.strerror}; the results in it are complete. "
            "Make room and run the command again: it sends only the requests that are left"
        ) from exc


@dataclass(frozen=True, slots=True)
class _Response:
    status: int | None
    body: Any = None
    request_id: str = ""
    retry_after_s: float = 0.0
    error: str = ""


class _Client:
    """Sends the requests of a run, from any thread, until the run ends.

    A request may be queued and generated for hours, so a response has no timeout. A server that
    has vanished is noticed by TCP instead, as its kernel does not reply either.
    """

    def __init__(self, batch: BatchRun) -> None:
        self._batch = batch
        url = urlsplit(batch.url)
        is_tls = url.scheme == "https"
        self._kind = http.client.HTTPSConnection if is_tls else http.client.HTTPConnection
        self._host, self._port = url.hostname or "", url.port or (443 if is_tls else 80)
        self._prefix = url.path.rstrip("/").removesuffix("/v1")
        self._headers = {"Content-Type": "application/json", "Connection": "close"}
        self._headers |= batch.headers
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._ended = threading.Event()

    def close(self) -> None:
        """Abort all requests: their threads get a ``_RunEnded``."""
        with self._lock:
            self._ended.set()
            for sock in self._open:
                hang_up(sock)

    def serve(self, line: _Line) -> dict[str, Any]:
        """Send a request, with retries; returns its line of the result file.

        Raises:
            _RunEnded: the client was closed.
        """
        batch = self._batch
        pause = batch.pause or self._ended.wait
        priority = line.body.get("priority")
        if priority is None or (isinstance(priority, int) and priority < BATCH_PRIORITY):
            priority = BATCH_PRIORITY
        body = msgspec.json.encode({**line.body, "priority": priority})
        num_failures, pause_s = 0, _MIN_PAUSE_S
        while True:
            got = self._post(line.url, body)
            if got.status is not None and got.status < 500 and got.status != 429:
                break
            num_failures += got.status not in _RETRIED_STATUSES
            if num_failures >= batch.max_attempts:
                break
            pause(min(got.retry_after_s or pause_s, _MAX_PAUSE_S))
            pause_s = min(2 * pause_s, _MAX_PAUSE_S)
        response = {"status_code": got.status, "request_id": got.request_id, "body": got.body}
        error = {"code": "no_answer", "message": got.error}
        return {
            "id": f"batch_req_{line.custom_id}",
            "custom_id": line.custom_id,
            "response": None if got.status is None else response,
            "error": error if got.status is None else None,
        }

    def _post(self, path: str, body: bytes) -> _Response:
        try:
            with self._connection() as connection:
                connection.request("POST", self._prefix + path, body, self._headers)
                with connection.getresponse() as response:
                    return _parse_response(response.status, response.headers, response.read())
        except (OSError, http.client.HTTPException) as exc:
            if self._ended.is_set():
                raise _RunEnded from exc
            return _Response(None, error=f"{self._batch.url} does not respond: {exc}")

    @contextmanager
    def _connection(self) -> Iterator[http.client.HTTPConnection]:
        connection = self._kind(self._host, self._port, timeout=_CONNECT_S)
        connection.connect()
        sock = connection.sock  # the connection forgets it when the response is its last one
        try:
            tune(sock)
            sock.settimeout(None)
            with self._lock:
                if self._ended.is_set():
                    raise _RunEnded
                self._open.add(sock)
            yield connection
        finally:
            with self._lock:
                self._open.discard(sock)
            connection.close()


def _parse_response(status: int, headers: Any, content: bytes) -> _Response:
    try:
        body = json.loads(content)
    except ValueError:
        body = content.decode(errors="replace")
    try:
        retry_after_s = max(float(headers.get("retry-after", 0.0)), 0.0)
    except ValueError:  # a date
        retry_after_s = 0.0
    return _Response(status, body, headers.get("x-request-id", ""), retry_after_s)


def authorization() -> dict[str, str]:
    """Returns the header with the API key in OPENAI_API_KEY; empty if that is not set.

    Raises:
        ConfigError: the key can't be sent in a header.
    """
    key = os.environ.get("OPENAI_API_KEY", "").strip()  # a file's last line break
    if not (key.isascii() and key.isprintable()):
        raise ConfigError("OPENAI_API_KEY must be one line of ASCII characters; set it again")
    return {"Authorization": f"Bearer {key}"} if key else {}
