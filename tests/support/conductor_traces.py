"""Traces with growing sessions, like conversations: Poisson arrivals, fixed seed."""

from __future__ import annotations

import json
import random
from pathlib import Path


def write_trace(path: Path, num_requests: int, per_second: float, seed: int = 4) -> Path:
    """Write a Mooncake trace; 60 % of the requests continue an earlier request's prompt."""
    rng, now, fresh = random.Random(seed), 0.0, 1
    sessions: list[list[int]] = []
    with path.open("w") as file:
        for _ in range(num_requests):
            now += rng.expovariate(per_second)
            if sessions and rng.random() < 0.6:
                keys = rng.choice(sessions[-60:])
            else:
                keys = [0]
                sessions.append(keys)
            added = rng.randrange(4, 30)
            keys.extend(range(fresh, fresh + added))
            fresh += added
            tokens = len(keys) * 512 + rng.randrange(1, 512)
            entry = {
                "timestamp": round(now * 1000),
                "input_length": tokens,
                "output_length": rng.randrange(1, 300),
                "hash_ids": [*keys, fresh],
            }
            fresh += 1
            file.write(json.dumps(entry) + "\n")
    return path
