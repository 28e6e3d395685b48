"""Which requests a D may continue from P's token."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import Raw

from mooncake_proxy.api.openai_bodies import parse_request
from mooncake_proxy.flows.continued_prompt import can_continue


@pytest.mark.parametrize("name", ["bad_words", "truncate_prompt_tokens", "temperature"])
def test_too_deeply_nested_field_is_left_to_instances(
    name: str,
) -> None:
    """The body is parsed with less stack in use than a field of it."""
    parsed, fields = parse_request(b'{"prompt": "a", "stream": true, "seed": 7}')
    depth = sys.getrecursionlimit()
    fields[name] = Raw(b"[" * depth + b"]" * depth)
    context: Any = SimpleNamespace(parsed=parsed, fields=fields, record=None)
    assert not can_continue(context)
