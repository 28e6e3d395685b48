"""Log probabilities in the two forms of OpenAI's API."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mooncake_engine.messages import TokenLogprobs

TokenBytes = Callable[[int], bytes]

_LEAST = -9999.0
"""JSON has no infinity; vLLM's value for a token that could not be chosen."""


def completion_logprobs(
    entries: Sequence[TokenLogprobs], text_offsets: Sequence[int], token_bytes: TokenBytes
) -> dict[str, Any]:
    """The form of ``/v1/completions``: four parallel lists."""
    return {
        "tokens": [_name(token_bytes(entry.token_id)) for entry in entries],
        "token_logprobs": [_finite(entry.logprob) for entry in entries],
        "top_logprobs": [
            {_name(token_bytes(token_id)): _finite(value) for token_id, value in _ranked(entry)}
            for entry in entries
        ],
        "text_offset": list(text_offsets),
    }


def after_first_token(lists: dict[str, Any], token: bytes) -> dict[str, Any]:
    """The four lists with a prompt's first token before them: nothing precedes it, so that it has
    no probability. Its offset is among the offsets already."""
    return {
        "tokens": [_name(token), *lists["tokens"]],
        "token_logprobs": [None, *lists["token_logprobs"]],
        "top_logprobs": [None, *lists["top_logprobs"]],
        "text_offset": lists["text_offset"],
    }


def prompt_logprobs(
    entries: Sequence[TokenLogprobs], token_bytes: TokenBytes
) -> list[dict[str, Any] | None]:
    """vLLM's form of ``prompt_logprobs``: per token, by id; null for the first one.

    Args:
        entries: of the prompt's tokens from the second one on.
    """
    return [None, *(_by_id(entry, token_bytes) for entry in entries)]


def _by_id(entry: TokenLogprobs, token_bytes: TokenBytes) -> dict[str, Any]:
    ranked = [(token_id, value, rank) for rank, (token_id, value) in enumerate(entry.top, 1)]
    return {
        str(token_id): {
            "logprob": _finite(value),
            "rank": rank,
            "decoded_token": token_bytes(token_id).decode(errors="replace"),
        }
        for token_id, value, rank in [*ranked, (entry.token_id, entry.logprob, entry.rank)]
    }


def chat_logprobs(entries: Sequence[TokenLogprobs], token_bytes: TokenBytes) -> dict[str, Any]:
    """The form of ``/v1/chat/completions``: one object per token."""
    return {
        "content": [
            _described(token_bytes(entry.token_id), entry.logprob)
            | {
                "top_logprobs": [
                    _described(token_bytes(token_id), value) for token_id, value in entry.top
                ]
            }
            for entry in entries
        ]
    }


def _ranked(entry: TokenLogprobs) -> list[tuple[int, float]]:
    """The best tokens, then the chosen one: clients look it up whatever its rank."""
    return [*entry.top, (entry.token_id, entry.logprob)]


def _described(token: bytes, logprob: float) -> dict[str, Any]:
    return {
        "token": token.decode(errors="replace"),
        "logprob": _finite(logprob),
        "bytes": list(token),
    }


def _name(token: bytes) -> str:
    """A token's text, or OpenAI's spelling for a piece of a character: names must differ."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)


def _finite(logprob: float) -> float:
    return max(logprob, _LEAST)
