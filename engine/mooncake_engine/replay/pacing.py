"""When each request of a replay is sent."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from mooncake_engine.errors import ConfigError
from mooncake_engine.replay.trace import TraceRequest


@dataclass(frozen=True, slots=True)
class Pacing:
    """How a trace's requests are sent: at the trace's own times unless something else is asked.

    Args:
        speedup: the trace's times are divided by it.
        rate: requests per second, at random times (Poisson), instead of the trace's.
        concurrency: so many at a time, one after another, instead of any times.
        seed: of the random times.

    Raises:
        ConfigError: values out of range, or that exclude each other.
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
        """When each is sent, in seconds from the beginning.

        Raises:
            ConfigError: the trace has no times, and nothing else was asked.
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
            raise ConfigError("the trace has no times: say --rate or --concurrency")
        return [(at_s - own[0]) / self.speedup for at_s in own]
