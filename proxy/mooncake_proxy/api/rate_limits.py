"""Rate limits of API keys: requests and tokens per minute, and the response headers about them.

Token buckets that refill continuously, as OpenAI's: a minute's worth may be used at once. A request
is charged its prompt and the new tokens that it asks for; unused tokens are returned when it ends.
Pure: no clock.
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
"""(requests, tokens) by key name."""


@dataclass(slots=True)
class Bucket:
    """A token bucket. May fall below zero if a request uses more than it was charged for.

    Args:
        limit: amount per minute, and the capacity; 0: no limit.
        left: amount left at time ``at``.
        at: time of the last refill, in seconds.
    """

    limit: float
    left: float
    at: float

    def refill(self, now: float) -> None:
        """Add what has refilled since the last call."""
        self.left = min(self.limit, self.left + (now - self.at) * self.limit / _MINUTE_S)
        self.at = now

    def wait_s(self, amount: float) -> float:
        """Seconds until `amount` is available; beyond the capacity, until the bucket is full."""
        lacking = min(amount, self.limit) - self.left
        return max(lacking, 0.0) * _MINUTE_S / self.limit if self.limit else 0.0

    def spend(self, amount: float) -> None:
        """Take `amount`; a negative one is returned to the bucket."""
        self.left = min(self.limit, self.left - amount)


class RateLimits:
    """The buckets of all keys that have limits.

    Args:
        keys: entries of the keys file.
        now: current time, in seconds.
    """

    def __init__(self, keys: Iterable[ApiKey], now: float) -> None:
        self._buckets: dict[str, dict[str, Bucket]] = {}
        self.set_keys(keys, now)
        # Spent since the last report to the other workers.
        self._spent: Usage = {}

    def set_keys(self, keys: Iterable[ApiKey], now: float) -> None:
        """Replace the keys. What those that stay have spent stays spent, under new limits too."""
        known, self._buckets = self._buckets, {}
        for key in keys:
            limits = {"requests": key.requests_per_minute, "tokens": key.tokens_per_minute}
            if any(limits.values()):
                before = known.get(key.name, {})
                self._buckets[key.name] = {
                    kind: _with_limit(before.get(kind), float(limit), now)
                    for kind, limit in limits.items()
                }

    def __contains__(self, name: str) -> bool:
        return name in self._buckets

    def take(self, name: str, num_tokens: int, now: float) -> None:
        """Charge a request of `num_tokens` tokens. Raises RateLimited if the key lacks them."""
        buckets, costs = self._buckets[name], {"requests": 1.0, "tokens": float(num_tokens)}
        for kind, bucket in buckets.items():
            bucket.refill(now)
            if (wait := bucket.wait_s(costs[kind])) > 0:
                raise RateLimited(name, kind, int(bucket.limit), max(bucket.left, 0), wait)
        self._spend(name, 1.0, float(num_tokens))

    def settle(self, name: str, num_tokens: float) -> None:
        """Correct the charge of a request by `num_tokens`; negative if it used fewer tokens."""
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
        """Return what was spent in this process since the last call."""
        spent, self._spent = self._spent, {}
        return spent

    def spent_elsewhere(self, usage: Usage) -> None:
        """Charge what was spent in another worker process."""
        for name, (requests, tokens) in usage.items():
            if name in self._buckets:
                self._buckets[name]["requests"].spend(requests)
                self._buckets[name]["tokens"].spend(tokens)

    def _spend(self, name: str, requests: float, tokens: float) -> None:
        before = self._spent.get(name, (0.0, 0.0))
        self._spent[name] = (before[0] + requests, before[1] + tokens)
        self._buckets[name]["requests"].spend(requests)
        self._buckets[name]["tokens"].spend(tokens)


def _with_limit(bucket: Bucket | None, limit: float, now: float) -> Bucket:
    """A bucket with this limit from which as much has been spent as from ``bucket``."""
    if bucket is None:
        return Bucket(limit, limit, now)
    bucket.refill(now)
    return Bucket(limit, limit - (bucket.limit - bucket.left), now)


def duration(seconds: float) -> str:
    """Format a duration as OpenAI does: 20ms, 1.5s, 6m0s."""
    if seconds < 1.0:
        return f"{math.ceil(seconds * 1000)}ms"
    minutes, rest = divmod(seconds, _MINUTE_S)
    return f"{int(minutes)}m{rest:.0f}s" if minutes else f"{rest:.3g}s"
