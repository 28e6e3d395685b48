"""A request's timeout, from body and header to the typed error."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from support.asgi import AsgiClient
from support.fake_engine import FakeEngine

PATH = "/v1/completions"


@pytest.mark.parametrize(
    ("in_header", "in_body", "seconds"),
    [(None, None, None), ("2.5", None, 2.5), (None, 3.0, 3.0), ("2", 3.0, 2.0), ("4", 3.0, 3.0)],
)
def test_the_shorter_timeout_applies(
    client: AsgiClient,
    engine: FakeEngine,
    in_header: str | None,
    in_body: float | None,
    seconds: float | None,
) -> None:
    headers = {} if in_header is None else {"X-Request-Timeout": in_header}
    response = replace(client, headers=headers).post(PATH, prompt="tea", timeout=in_body)
    assert response.status_code == 200
    assert engine.seen[0].timeout_s == seconds


@pytest.mark.parametrize("value", ["soon", "-1", "0", "nan", "inf"])
def test_an_invalid_timeout_is_rejected(client: AsgiClient, value: str) -> None:
    response = replace(client, headers={"X-Request-Timeout": value}).post(PATH, prompt="tea")
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "X-Request-Timeout"


def test_a_timeout_is_a_typed_error(client: AsgiClient, engine: FakeEngine) -> None:
    engine.late_at = 1
    response = client.post(PATH, prompt="tea")
    assert response.status_code == 504
    error = {"message": "late", "type": "timeout", "param": None, "code": "deadline_exceeded"}
    assert response.json()["error"] == error
    assert response.headers["x-should-retry"] == "false"
    *events, last = client.post(PATH, prompt="tea", stream=True).text.strip().split("\n\n")
    assert len(events) == 1
    assert json.loads(last.removeprefix("data: "))["error"] == error
