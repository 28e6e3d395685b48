"""The forms in which models call tools, by name."""

from __future__ import annotations

from mooncake_engine.text.qwen3_coder import Qwen3CoderParser
from mooncake_engine.text.tool_calls import HermesParser, Llama3Parser, ToolCallParser

PARSERS: dict[str, type[ToolCallParser]] = {
    "hermes": HermesParser,
    "llama3_json": Llama3Parser,
    "qwen3_coder": Qwen3CoderParser,
}
"""By the names that vLLM gives them."""


def detect_parser(chat_template: str | None) -> str | None:
    """The form that a chat template teaches, or None."""
    if chat_template is None or "tools" not in chat_template:
        return None
    if Qwen3CoderParser.function in chat_template:  # within Hermes' tags
        return "qwen3_coder"
    if HermesParser.opening in chat_template:
        return "hermes"
    is_llama = '"parameters"' in chat_template and "<|start_header_id|>" in chat_template
    return "llama3_json" if is_llama else None
