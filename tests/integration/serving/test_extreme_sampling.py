"""Sampling parameters at the ends of their ranges, and beyond, are served or refused."""

from __future__ import annotations

import random
from typing import Any

import httpx
from support.extreme_sampling import BODY, each_value, some_values

NUM_REQUESTS = 150


def test_extreme_values_end_nothing_but_their_request(tiny_llama_url: str) -> None:
    numbers = random.Random(14)
    with httpx.Client(base_url=tiny_llama_url, timeout=60, trust_env=False) as client:

        def ask(body: dict[str, Any]) -> httpx.Response:
            return client.post("/v1/completions", json=body)

        before = ask(BODY).json()["choices"]
        statuses = {ask(body).status_code for body in each_value()}
        statuses |= {ask(some_values(numbers)).status_code for _ in range(NUM_REQUESTS)}
        assert statuses == {200, 400}
        assert client.get("/health").status_code == 200
        assert ask(BODY).json()["choices"] == before
