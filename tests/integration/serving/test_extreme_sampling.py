"""Sampling parameters at and beyond the limits of their ranges are served or rejected.

By one instance, by two ranks, and by a pair that pulls or pushes, through the proxy.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from support.extreme_sampling import BODY, each_value, some_values
from support.programs import TINY_LLAMA
from support.running import deployment, serving

NUM_REQUESTS = int(os.environ.get("SAMPLING_FUZZ_REQUESTS", "60"))
"""Number of random combinations per deployment; an environment variable sets a longer run."""
OPTIONS = ("--threads", "1", "--num-kv-blocks", "512")
PUSH = ("--kv-connector", "MooncakeLayerwiseConnector")


@pytest.fixture(scope="module", params=["one instance", "two ranks", "pull", "push"])
def url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    logs = tmp_path_factory.mktemp("logs")
    if request.param in ("one instance", "two ranks"):
        ranks = ("--tp-size", "2") if request.param == "two ranks" else ()
        with serving(TINY_LLAMA, logs, "both", *OPTIONS, *ranks) as found:
            yield found
        return
    is_push = request.param == "push"
    arguments = (*OPTIONS, "--transport", "shm", *(PUSH if is_push else ()))
    flow = ("--flow", "push") if is_push else ()
    with deployment(TINY_LLAMA, logs, arguments, flow) as found:
        yield found


def test_extreme_values_affect_only_their_request(url: str) -> None:
    """Each value alone, then several at random. A dead instance would show as another status or as
    no response, and one that was damaged otherwise by its later answers."""
    numbers = random.Random(14)
    with httpx.Client(base_url=url, timeout=60, trust_env=False) as client:

        def ask(body: dict[str, Any]) -> httpx.Response:
            response = client.post("/v1/completions", json=body)
            assert response.status_code in (200, 400), (body, response.text)
            return response

        before = [choice["text"] for choice in ask(BODY).json()["choices"]]
        statuses = {ask(body).status_code for body in each_value()}
        statuses |= {ask(some_values(numbers)).status_code for _ in range(NUM_REQUESTS)}
        assert statuses == {200, 400}
        assert client.get("/health").status_code == 200
        assert [choice["text"] for choice in ask(BODY).json()["choices"]] == before
