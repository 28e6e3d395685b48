"""Continuous-batching LLM engine with disaggregated prefill and decode.

``LLM`` generates offline; ``mooncake-engine serve`` serves the OpenAI API.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mooncake_engine.llm import LLM
    from mooncake_engine.llm_engine import LLMEngine
    from mooncake_engine.sampling_params import SamplingParams

__all__ = ["LLM", "LLMEngine", "SamplingParams"]


def __getattr__(name: str) -> Any:
    """Import a public name at its first use, so that importing the package is cheap."""
    if name == "LLM":
        from mooncake_engine.llm import LLM

        return LLM
    if name == "LLMEngine":
        from mooncake_engine.llm_engine import LLMEngine

        return LLMEngine
    if name == "SamplingParams":
        from mooncake_engine.sampling_params import SamplingParams

        return SamplingParams
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
