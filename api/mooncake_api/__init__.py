"""Other forms of chat completions: OpenAI's Responses and Anthropic's Messages.

A request is translated into the chat request that says the same, and what a server answers to that,
whole or streamed, into the form that was asked in. Nothing here serves, keeps or remembers anything
between two requests.
"""

from __future__ import annotations

from collections.abc import Mapping

from mooncake_api.errors import RequestRefused
from mooncake_api.messages_answer import MESSAGES
from mooncake_api.messages_request import count_tokens_request
from mooncake_api.responses_answer import RESPONSES
from mooncake_api.translation import ApiFormat, Translation

API_FORMATS: Mapping[str, ApiFormat] = {each.path: each for each in (RESPONSES, MESSAGES)}
"""By the path that they are posted to."""
COUNT_TOKENS_PATH = f"{MESSAGES.path}/count_tokens"

__all__ = [
    "API_FORMATS",
    "COUNT_TOKENS_PATH",
    "MESSAGES",
    "ApiFormat",
    "RequestRefused",
    "Translation",
    "count_tokens_request",
]
