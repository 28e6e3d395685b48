"""When an answer came on: what metrics and traces are made of."""

from __future__ import annotations

import time
from dataclasses import dataclass

from mooncake_engine.messages import FinishReason, RequestTimes
from mooncake_engine.text.generation import TextUpdate


@dataclass(frozen=True, slots=True)
class Stage:
    """A part of an answer's time, by a clock like ``time.monotonic``, in seconds."""

    name: str
    start: float
    end: float

    @property
    def duration_s(self) -> float:
        """How long it took."""
        return self.end - self.start


class RequestClock:
    """Times one answer, from now on.

    Args:
        num_prompt_tokens: of its prompt.
    """

    def __init__(self, num_prompt_tokens: int) -> None:
        self.num_prompt_tokens = num_prompt_tokens
        self.num_cached_tokens = 0
        self.num_tokens = 0
        self.started = time.monotonic()
        self.first_token: float | None = None
        self.last_token: float | None = None
        self.finish: FinishReason | None = None
        self.times: RequestTimes | None = None

    def advance(self, update: TextUpdate, now: float) -> float | None:
        """Take an update in that came at ``now``; seconds since the last token, if it is not the
        first one."""
        self.finish = update.finish
        self.times = update.times or self.times
        self.num_cached_tokens = max(self.num_cached_tokens, update.num_cached_tokens)
        if not update.token_ids:
            return None
        gap = None if self.last_token is None else now - self.last_token
        self.first_token = self.first_token or now
        self.last_token = now
        self.num_tokens += len(update.token_ids)
        return gap

    def stages(self) -> list[Stage]:
        """How the time was spent, as far as the answer has come: waiting for a place (``queue``),
        loading a peer's KV (``kv_transfer``), computing the prompt (``prefill``) and the tokens
        after the first one (``decode``)."""
        times = self.times
        if times is None:
            return []
        stages = []
        if times.load_started is not None:
            stages.append(Stage("queue", times.arrived, times.load_started))
            if times.loaded is not None:
                stages.append(Stage("kv_transfer", times.load_started, times.loaded))
        elif times.scheduled is not None:
            stages.append(Stage("queue", times.arrived, times.scheduled))
        return stages + self._computing(times)

    def _computing(self, times: RequestTimes) -> list[Stage]:
        if times.scheduled is None or self.first_token is None or self.last_token is None:
            return []
        if times.loaded is not None:  # the peer had the first token
            return [Stage("decode", times.scheduled, self.last_token)]
        prefill = Stage("prefill", times.scheduled, self.first_token)
        if self.num_tokens < 2:
            return [prefill]
        return [prefill, Stage("decode", self.first_token, self.last_token)]
