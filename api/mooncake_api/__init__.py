"""Translates OpenAI's Responses API and Anthropic's Messages API to chat completions and back.

Engine and proxy use this package. A request becomes the equivalent chat request; the chat response,
complete or streamed, becomes a response in the client's format. The package serves nothing itself
and keeps no state between requests. The formats are in ``api_formats``; a server that receives no
such request need not import it. What else engine and proxy agree on is in ``instance_protocol``.
"""

from __future__ import annotations

from mooncake_api.errors import RequestRejected

RESPONSES_PATH = "/v1/responses"
MESSAGES_PATH = "/v1/messages"
FORMAT_PATHS = (RESPONSES_PATH, MESSAGES_PATH)
"""The paths to which requests in other formats are posted."""
COUNT_TOKENS_PATH = f"{MESSAGES_PATH}/count_tokens"

__all__ = [
    "COUNT_TOKENS_PATH",
    "FORMAT_PATHS",
    "MESSAGES_PATH",
    "RESPONSES_PATH",
    "RequestRejected",
]
