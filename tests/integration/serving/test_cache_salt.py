"""``cache_salt`` over HTTP separates prefix caches: in one instance, with pull, and with push."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.pd import write_model
from support.running import deployment, serving

TIMEOUT_S = 90.0
OPTIONS = ("--threads", "1", "--num-kv-blocks", "128", "--block-size", "16", "--transport", "shm")
PUSH = ("--kv-connector", "MooncakeLayerwiseConnector")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module", params=["single", "pull", "push"])
def url(
    request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    scratch = tmp_path_factory.mktemp("logs")
    if request.param == "single":
        with serving(model, scratch, "both", *OPTIONS[:-2]) as found:
            yield found
        return
    is_push = request.param == "push"
    arguments = (*OPTIONS, *(PUSH if is_push else ()))
    flow = ("--flow", "push") if is_push else ()
    with deployment(model, scratch, arguments, flow) as found:
        yield found


def ask(url: str, **fields: Any) -> httpx.Response:
    body = {"prompt": list(range(3, 83)), "max_tokens": 4, "temperature": 0, **fields}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=TIMEOUT_S, trust_env=False)


def num_cached(response: httpx.Response) -> int:
    assert response.status_code == 200, response.text
    details = response.json()["usage"].get("prompt_tokens_details") or {}
    return int(details.get("cached_tokens") or 0)


def test_only_requests_with_same_salt_share_cached_prefix(url: str) -> None:
    texts = set()
    for salt, is_cached in [("a", False), ("a", True), ("b", False), ("", False), ("b", True)]:
        response = ask(url, **({"cache_salt": salt} if salt else {}))
        assert (num_cached(response) > 0) == is_cached, (salt, response.text)
        texts.add(response.json()["choices"][0]["text"])
    assert len(texts) == 1, "the answer is the same wherever the KV came from"


@pytest.mark.parametrize("salt", ["", "x" * 1025, 5])
def test_invalid_salt_is_rejected(url: str, salt: object) -> None:
    response = ask(url, cache_salt=salt)
    assert response.status_code == 400
    assert "cache_salt" in response.text
