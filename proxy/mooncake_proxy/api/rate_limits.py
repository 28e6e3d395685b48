"""Requests and tokens per minute of API keys, and the headers that tell clients about them.

Buckets that refill all the time, as OpenAI's: a minute's worth may be used at once, and comes back
by the second. A request costs its prompt and the new tokens that it asks for; what it did not use
is given back when it ends. Pure: no clock.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from mooncake_proxy.api.api_keys import ApiKey
from mooncake_proxy.errors import RateLimited
from mooncake_proxy.http1.http_wire import header_lines

_MINUTE_S = 60.0
Usage = dict[str, tuple[float, float]]
"""Requests and tokens by the name of the key."""


@dataclass(slots=True)
class Bucket:
    """So much per minute; 0 for no limit. May fall below zero, if a request used more than it said.

    Args:
        limit: per minute, and the most that it holds.
        left: at ``at``.
        at: the time, in seconds.
    """

    limit: float
    left: float
    at: float

    def refill(self, now: float) -> None:
        """What has come back meanwhile."""
        self.left = min(self.limit, self.left + (now - self.at) * self.limit / _MINUTE_S)
        self.at = now

    def wait_s(self, amount: float) -> float:
        """Seconds until so much is there; more than it ever holds is asked for as all of it."""
        lacking = min(amount, self.limit) - self.left
        return max(lacking, 0.0) * _MINUTE_S / self.limit if self.limit else 0.0

    def spend(self, amount: float) -> None:
        """Take so much, or give it back."""
        self.left = min(self.limit, self.left - amount)


class RateLimits:
    """The buckets of all keys that have limits.

    Args:
        keys: of the keys file.
        now: the time, in seconds.
    """

    def __init__(self, keys: Iterable[ApiKey], now: float) -> None:
        self._buckets = {
            key.name: {
                "requests": Bucket(float(key.requests_per_minute), key.requests_per_minute, now),
                "tokens": Bucket(float(key.tokens_per_minute), key.tokens_per_minute, now),
            }
            for key in keys
            if key.requests_per_minute or key.tokens_per_minute
        }
        # Since it was last told to the other workers.
        self._spent: Usage = {}

    def __contains__(self, name: str) -> bool:
        return name in self._buckets

    def take(self, name: str, num_tokens: int, now: float) -> None:
        """A request of so many tokens. RateLimited if the key has not so much left."""
        buckets, costs = self._buckets[name], {"requests": 1.0, "tokens": float(num_tokens)}
        for kind, bucket in buckets.items():
            bucket.refill(now)
            if (wait := bucket.wait_s(costs[kind])) > 0:
                raise RateLimited(name, kind, int(bucket.limit), max(bucket.left, 0), wait)
        self._spend(name, 1.0, float(num_tokens))

    def settle(self, name: str, num_tokens: float) -> None:
        """A request used so many tokens more than it said; fewer are a negative number."""
        self._spend(name, 0.0, num_tokens)

    def headers(self, name: str, now: float) -> bytes:
        """OpenAI's `x-ratelimit-*` header lines."""
        lines = []
        for kind, bucket in self._buckets[name].items():
            if bucket.limit:
                bucket.refill(now)
                reset = (bucket.limit - bucket.left) * _MINUTE_S / bucket.limit
                lines += [
                    (f"x-ratelimit-limit-{kind}", f"{bucket.limit:.0f}"),
                    (f"x-ratelimit-remaining-{kind}", f"{max(int(bucket.left), 0)}"),
                    (f"x-ratelimit-reset-{kind}", duration(reset)),
                ]
        return header_lines(lines)

    def spent(self) -> Usage:
        """What was spent here since this was last asked for."""
        spent, self._spent = self._spent, {}
        return spent

    def spent_elsewhere(self, usage: Usage) -> None:
        """What another worker process let through."""
        for name, (requests, tokens) in usage.items():
            if name in self._buckets:
                self._buckets[name]["requests"].spend(requests)
                self._buckets[name]["tokens"].spend(tokens)

    def _spend(self, name: str, requests: float, tokens: float) -> None:
        before = self._spent.get(name, (0.0, 0.0))
        self._spent[name] = (before[0] + requests, before[1] + tokens)
        self._buckets[name]["requests"].spend(requests)
        self._buckets[name]["tokens"].spend(tokens)


def duration(seconds: float) -> str:
    """As OpenAI writes it: 20ms, 1.5s, 6m0s."""
    if seconds < 1.0:
        return f"{math.ceil(seconds * 1000)}ms"
    minutes, rest = divmod(seconds, _MINUTE_S)
    return f"{int(minutes)}m{rest:.0f}s" if minutes else f"{rest:.3g}s"
