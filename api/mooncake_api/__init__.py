"""Other forms of chat completions: OpenAI's Responses and Anthropic's Messages.

A request is translated into the chat request that says the same, and what a server answers to that,
whole or streamed, into the form that was asked in. Nothing here serves, keeps or remembers anything
between two requests. The forms themselves are in ``api_formats``, which a server that is asked for
none of them need not import.
"""

from __future__ import annotations

from mooncake_api.errors import RequestRefused

RESPONSES_PATH = "/v1/responses"
MESSAGES_PATH = "/v1/messages"
FORMAT_PATHS = (RESPONSES_PATH, MESSAGES_PATH)
"""That requests of another form are posted to."""
COUNT_TOKENS_PATH = f"{MESSAGES_PATH}/count_tokens"

__all__ = [
    "COUNT_TOKENS_PATH",
    "FORMAT_PATHS",
    "MESSAGES_PATH",
    "RESPONSES_PATH",
    "RequestRefused",
]
