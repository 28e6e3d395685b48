"""Attacks by a client with a key, through the content of requests."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from support.abuse.attack import Attack, Attempts, Target
from support.abuse.verdicts import Bounds
from support.abuse.wire import post
from support.extreme_sampling import each_value, some_values

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
SERVED_OR_REFUSED = frozenset({200, 400})
REFUSED = frozenset({400, 413})
USER = {"role": "user", "content": "hi"}
Json = dict[str, Any]
Requests = Callable[[Attempts], Iterator[tuple[str, Any]]]


def send(
    target: Target,
    attempts: Attempts,
    requests: Callable[[Attempts], Iterable[tuple[str, Any]]],
    allowed: frozenset[int],
) -> None:
    """Post the paths and bodies that ``requests`` yields, repeatedly."""
    made = _cycle(requests, attempts)
    for _ in attempts:
        path, body = next(made)
        what = f"{path} {json.dumps(body)[:100] if not isinstance(body, bytes) else body[:60]!r}"
        post(target, attempts, path, body, allowed=allowed, what=what)


def _cycle(
    requests: Callable[[Attempts], Iterable[tuple[str, Any]]], attempts: Attempts
) -> Iterator[tuple[str, Any]]:
    while True:
        yield from requests(attempts)


def extreme_sampling(attempts: Attempts) -> Iterator[tuple[str, Any]]:
    """Every value at and beyond the limits of its range, formerly deadly ones first."""
    for body in each_value():
        yield COMPLETIONS, body
    while True:
        yield COMPLETIONS, some_values(attempts.numbers)


def many_tools(_: Attempts) -> Iterator[tuple[str, Any]]:
    """Tens of thousands of tools, all with different names."""
    for number in (129, 24_000, 100_000):
        tools = [{"type": "function", "function": {"name": f"f{i}"}} for i in range(number)]
        yield CHAT, {"messages": [USER], "tools": tools}
        yield "/tokenize", {"messages": [USER], "tools": tools}


def huge_prompts(_: Attempts) -> Iterator[tuple[str, Any]]:
    """Texts of up to 60 MiB."""
    for mib in (1, 8, 60):
        text = "tea " * (mib << 18)
        yield COMPLETIONS, {"prompt": text}
        yield CHAT, {"messages": [{"role": "user", "content": text}]}
        yield "/tokenize", {"prompt": text}
        yield COMPLETIONS, {"prompt": [5] * (mib << 18)}
    yield COMPLETIONS, b'{"prompt":"' + b"x" * (70 << 20) + b'"}'


def many_messages(_: Attempts) -> Iterator[tuple[str, Any]]:
    """Hundreds of thousands of messages, and of parts of one."""
    yield CHAT, {"messages": [USER] * 200_000}
    yield "/tokenize", {"messages": [USER] * 200_000}
    parts = [{"type": "text", "text": "hi"}] * 200_000
    yield CHAT, {"messages": [{"role": "user", "content": parts}]}


def huge_stops(_: Attempts) -> Iterator[tuple[str, Any]]:
    """Stop strings, stop ids and biases far beyond their limits."""
    plain = {"prompt": "hello", "max_tokens": 2}
    yield COMPLETIONS, {**plain, "stop_token_ids": list(range(1_000_000))}
    yield COMPLETIONS, {**plain, "stop": "x" * (1 << 20)}
    yield COMPLETIONS, {**plain, "stop": ["x" * 100] * 100_000}
    yield COMPLETIONS, {**plain, "logit_bias": {str(i): 1 for i in range(300_000)}}
    yield COMPLETIONS, {**plain, "stop_token_ids": [5] * 1025}


def long_ids(_: Attempts) -> Iterator[tuple[str, Any]]:
    """Token ids to detokenise, up to the limit and beyond."""
    for number in (100_000, 1 << 20, (1 << 20) + 1, 4 << 20):
        yield "/detokenize", {"tokens": [65] * number}


def odd_json(_: Attempts) -> Iterator[tuple[str, Any]]:
    """Bodies that are deeply nested, truncated, doubled, or of another type."""
    yield COMPLETIONS, b"[" * 100_000
    yield COMPLETIONS, b'{"prompt":' + b"[" * 200_000 + b"]" * 200_000 + b"}"
    yield CHAT, b'{"messages":[{"role":"user","content":"\\ud800"}]}'
    yield COMPLETIONS, b'{"prompt":"a","metadata":' + b'{"a":' * 50_000 + b"1" + b"}" * 50_001
    for body in (b"", b"null", b"[]", b"1e999", b'{"prompt":"a","max_tokens":1e999}', b"\xff\xfe"):
        yield COMPLETIONS, body
    yield COMPLETIONS, {"prompt": "a", "max_tokens": 10**30}
    yield COMPLETIONS, {"prompt": "a", "timeout": 1e-320}
    yield COMPLETIONS, {"prompt": "a" * 10, "max_tokens": -1}
    yield COMPLETIONS, {"prompt": "a", "priority": 10**400}


def many_choices(_: Attempts) -> Iterator[tuple[str, Any]]:
    """The maximum number of choices in one request, and more."""
    yield COMPLETIONS, {"prompt": ["a"] * 1025, "max_tokens": 1}
    yield COMPLETIONS, {"prompt": ["a"] * 64, "n": 64, "max_tokens": 1}
    yield COMPLETIONS, {"prompt": ["a"] * 128, "n": 128, "max_tokens": 1}
    yield COMPLETIONS, {"prompt": "a", "n": 128, "best_of": 128, "max_tokens": 2}


def urgent_requests(_: Attempts) -> Iterator[tuple[str, Any]]:
    """Requests that claim priority over all others."""
    yield COMPLETIONS, {"prompt": "hello world", "max_tokens": 64, "priority": -(10**9)}
    yield COMPLETIONS, {"prompt": "hello world", "max_tokens": 64, "priority": -(2**63)}


def grammar_bombs(_: Attempts) -> Iterator[tuple[str, Any]]:
    """Regular expressions, schemas and grammars that explode when they are compiled."""
    deep: Any = {"type": "string"}
    for _level in range(60):
        deep = {"type": "object", "properties": {c: deep for c in "ab"}, "required": ["a", "b"]}
        if len(json.dumps(deep)) > 200_000:
            break
    chain = "\n".join(f"r{i}: r{i + 1} r{i + 1}" for i in range(40)) + '\nr40: "a"'
    for structure in (
        {"regex": "(a{1,1000}){1,1000}"},
        {"regex": "(a|aa)+" * 200 + "$"},
        {"regex": "((((((a?){50})?){50})?){50})?" * 5},
        {"regex": "[\\p{L}\\p{N}]{1,5000}" * 50},
        {"regex": "(?:.*a){0,3000}"},
        {"regex": "(" * 5000 + "a" + ")" * 5000},
        {"json": deep},
        {"json": {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}},
        {"json": {"enum": [f"word {i}" for i in range(20_000)]}},
        {"json": {"type": "string", "pattern": "(x+x+)+y", "maxLength": 100_000}},
        {"json": {"type": "array", "minItems": 10**6, "items": {"type": "integer"}}},
        {"json": {"allOf": [{"pattern": f"a{{{i},}}b?"} for i in range(200)], "type": "string"}},
        {"choice": [f"choice {i}" for i in range(20_000)]},
        {"grammar": f"start: r0\n{chain}"},
        {"grammar": 'start: a\na: a a | b\nb: b | a | "x"'},
    ):
        yield COMPLETIONS, {"prompt": "a", "max_tokens": 4, "structured_outputs": structure}


def made_up_kv_params(attempts: Attempts) -> Iterator[tuple[str, Any]]:
    """Fields that only the proxy may set; from a client they must have no effect."""
    numbers = attempts.numbers
    plain = {"prompt": "hello world", "max_tokens": 3, "temperature": 0}
    remote = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": f"made-up-{numbers.randrange(10**6)}",
        "remote_request_id": f"r{numbers.randrange(10**6)}",
        "remote_host": "127.0.0.1",
        "remote_port": numbers.randrange(1, 65_536),
        "remote_block_ids": [[1, 2, 3]],
        "remote_block_size": 16,
        "num_prompt_tokens": 12,
        "last_token_id": 5,
    }
    yield COMPLETIONS, {**plain, "kv_transfer_params": remote}
    yield COMPLETIONS, {**plain, "kv_transfer_params": {"do_remote_decode": True}}
    yield COMPLETIONS, {**plain, "kv_transfer_params": {**remote, "metaserver": "http://x/"}}
    nested: Any = []
    for _level in range(100):
        nested = [nested]
    yield COMPLETIONS, {**plain, "kv_transfer_params": {"a": nested, "b": "x" * 100_000}}


def _attack(name: str, requests: Requests, allowed: frozenset[int], **facts: Any) -> Attack:
    about = (requests.__doc__ or "").partition("\n")[0]
    return Attack(name, about, partial(send, requests=requests, allowed=allowed), **facts)


ATTACKS = (
    _attack("extreme-sampling", extreme_sampling, SERVED_OR_REFUSED, connectors=("pull", "push")),
    _attack("many-tools", many_tools, SERVED_OR_REFUSED, bounds=Bounds(growth_mib=128)),
    _attack("huge-prompts", huge_prompts, REFUSED, bounds=Bounds(growth_mib=768, silence_s=8.0)),
    _attack("many-messages", many_messages, REFUSED, bounds=Bounds(growth_mib=128)),
    _attack("huge-stops", huge_stops, REFUSED, bounds=Bounds(growth_mib=128)),
    _attack("long-ids", long_ids, SERVED_OR_REFUSED | REFUSED, bounds=Bounds(growth_mib=128)),
    _attack("odd-json", odd_json, SERVED_OR_REFUSED | {504}),
    _attack("many-choices", many_choices, SERVED_OR_REFUSED | {429}, bounds=Bounds(growth_mib=128)),
    _attack("urgent-requests", urgent_requests, SERVED_OR_REFUSED),
    _attack(
        "grammar-bombs",
        grammar_bombs,
        SERVED_OR_REFUSED,
        bounds=Bounds(growth_mib=256),
        at_least_s=5.0,
    ),
    _attack("made-up-kv-params", made_up_kv_params, SERVED_OR_REFUSED, connectors=("pull", "push")),
)
