"""All API formats, by the path to which their requests are posted."""

from __future__ import annotations

from collections.abc import Mapping

from mooncake_api.messages_answer import MESSAGES
from mooncake_api.messages_request import count_tokens_request
from mooncake_api.responses_answer import RESPONSES
from mooncake_api.translation import ApiFormat, Translation

API_FORMATS: Mapping[str, ApiFormat] = {each.path: each for each in (RESPONSES, MESSAGES)}

__all__ = ["API_FORMATS", "MESSAGES", "ApiFormat", "Translation", "count_tokens_request"]
