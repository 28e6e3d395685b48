"""HTTP client that sends requests to a running OpenAI-compatible server and times the answers.

The only file of the conductor with network I/O.
"""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from mooncake_conductor.errors import CalibrationFailed

_DONE = b"[DONE]"


@dataclass(frozen=True, slots=True)
class TimedCompletion:
    """Timing of one streamed answer, as seen by the client.

    Args:
        started: time at which the request was sent, by ``time.perf_counter``.
        arrivals: time at which each part of the answer arrived, by the same clock.
        num_tokens: tokens of the answer; a part may contain several. 0: one per part.
    """

    started: float
    arrivals: tuple[float, ...]
    num_tokens: int = 0

    @property
    def ttft(self) -> float:
        """Seconds to the first part."""
        return self.arrivals[0] - self.started

    @property
    def gaps(self) -> list[float]:
        """Seconds between parts."""
        return [b - a for a, b in zip(self.arrivals, self.arrivals[1:], strict=False)]

    @property
    def tokens_per_part(self) -> float:
        """Mean tokens per part after the first."""
        num_parts = len(self.arrivals) - 1
        return max(self.num_tokens - 1, num_parts) / max(num_parts, 1)

    @property
    def mean_gap(self) -> float:
        """Seconds per token after the first."""
        steps = max(self.num_tokens, len(self.arrivals)) - 1
        return (self.arrivals[-1] - self.arrivals[0]) / max(steps, 1)


class LiveInstance:
    """A server at a URL.

    Args:
        url: ``http://host:port``, without a path.
        timeout_s: timeout of a read in seconds, after which a silent server counts as failed.
        api_key: sent as a bearer token; empty: none.
        model: the model to request; empty: the first one that the server lists.
    """

    def __init__(
        self, url: str, *, timeout_s: float = 120.0, api_key: str = "", model: str = ""
    ) -> None:
        try:
            parts = urlsplit(url)
            is_url = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        except ValueError:  # the port is not a number, or an IPv6 address is incomplete
            is_url = False
        if not is_url:
            raise CalibrationFailed(f"an instance is http://HOST:PORT, found {url!r}")
        self._parts = parts
        self._timeout_s = timeout_s
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self.model = model or self._first_model()

    def complete(self, prompt: Sequence[int], num_tokens: int) -> TimedCompletion:
        """Send a prompt of token ids, and stream exactly `num_tokens` tokens.

        Raises:
            CalibrationFailed: the server can't be reached, refuses the request, or times out.
        """
        body = {
            "model": self.model,
            "prompt": list(prompt),
            "max_tokens": num_tokens,
            "temperature": 0,
            "stream": True,
            "ignore_eos": True,
        }
        connection = self._connect()
        started = time.perf_counter()
        try:
            connection.request("POST", "/v1/completions", json.dumps(body), self._headers)
            response = connection.getresponse()
            self._check(response)
            arrivals = []
            for line in response:
                if line.startswith(b"data:") and _DONE not in line:
                    arrivals.append(time.perf_counter())
        except (OSError, http.client.HTTPException) as exc:
            raise CalibrationFailed(f"{self._parts.geturl()} failed: {exc}") from exc
        finally:
            connection.close()
        if not arrivals:
            raise CalibrationFailed(f"{self._parts.geturl()} ended a stream without a token")
        return TimedCompletion(started, tuple(arrivals), num_tokens)

    def _connect(self) -> http.client.HTTPConnection:
        host, port = str(self._parts.hostname), self._parts.port
        if self._parts.scheme == "https":
            return http.client.HTTPSConnection(host, port, timeout=self._timeout_s)
        return http.client.HTTPConnection(host, port, timeout=self._timeout_s)

    def _check(self, response: http.client.HTTPResponse) -> None:
        if response.status != 200:
            said = response.read(300).decode("utf-8", "replace")
            raise CalibrationFailed(f"{self._parts.geturl()} answered {response.status}: {said}")

    def _first_model(self) -> str:
        connection = self._connect()
        try:
            connection.request("GET", "/v1/models", headers=self._headers)
            response = connection.getresponse()
            self._check(response)
            listed: Any = json.loads(response.read())
            return str(listed["data"][0]["id"])
        except (OSError, http.client.HTTPException) as exc:
            raise CalibrationFailed(f"{self._parts.geturl()} can't be reached: {exc}") from exc
        except (ValueError, LookupError, TypeError) as exc:
            raise CalibrationFailed(f"{self._parts.geturl()} lists no model: {exc!r}") from exc
        finally:
            connection.close()
