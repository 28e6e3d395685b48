"""Sampling parameters at the ends of their ranges, and beyond, are served or refused."""

from __future__ import annotations

import random
from typing import Any

import httpx

NUM_REQUESTS = 150
VALUES: dict[str, list[Any]] = {
    "temperature": [0, 5e-324, 1e-38, 1e-6, 100, 100.1, -1, 1e308],
    "top_p": [5e-324, 1e-10, 1, 0, 1.1],
    "top_k": [-1, 0, 1, 2**31, 2**31 + 1, -2],
    "min_p": [0, 1, 1.1, -0.1],
    "repetition_penalty": [0.01, 100, 1e-40, 5e-324, 0, 101],
    "presence_penalty": [-2, 2, 2.1],
    "frequency_penalty": [-2, 2, -2.1],
    "seed": [-(2**63), 2**64 - 1, 2**64],
    "n": [1, 3, 129],
    "min_tokens": [0, 3, 4],
    "logprobs": [0, 128, 129],
    "stop": ["x", "y" * 8192, "z" * 8193],
    "stop_token_ids": [[], list(range(1024)), list(range(1025)), [-1], [10**6]],
    "logit_bias": [{}, {str(i): -100 for i in range(256)}, {"5": 100}, {"5": 101}, {"-1": 0}],
    "ignore_eos": [True, False],
}


def test_extreme_values_end_nothing_but_their_request(tiny_llama_url: str) -> None:
    numbers = random.Random(14)
    with httpx.Client(base_url=tiny_llama_url, timeout=60, trust_env=False) as client:

        def ask(**fields: Any) -> httpx.Response:
            body = {"prompt": "hello world", "max_tokens": 3, "temperature": 0, **fields}
            return client.post("/v1/completions", json=body)

        before = ask().json()["choices"]
        statuses = set()
        for name, values in VALUES.items():
            for value in values:
                statuses.add(ask(**{"temperature": 1, name: value}).status_code)
        for _ in range(NUM_REQUESTS):
            names = numbers.sample(list(VALUES), numbers.randrange(1, 6))
            statuses.add(ask(**{name: numbers.choice(VALUES[name]) for name in names}).status_code)
        assert statuses == {200, 400}
        assert client.get("/health").status_code == 200
        assert ask().json()["choices"] == before
