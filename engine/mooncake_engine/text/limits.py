"""What an engine's facts mean for one prompt and its answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mooncake_engine.errors import InvalidRequest, PromptTooLong
from mooncake_engine.messages import EngineFacts
from mooncake_engine.sampling_params import SamplingParams

_SEED_SPACE = 2**63


def check_prompt(token_ids: Sequence[int], facts: EngineFacts, *, param: str) -> None:
    """Raises InvalidRequest or PromptTooLong for a prompt that the engine can't continue."""
    if not token_ids:
        raise InvalidRequest(f"{param} is empty: at least one token is needed", param=param)
    if len(token_ids) >= facts.max_model_len:
        raise PromptTooLong(
            f"{param} has {len(token_ids)} tokens; the context of {facts.max_model_len} leaves "
            f"room for prompts of at most {facts.max_model_len - 1}: shorten it",
            param=param,
        )
    low, high = min(token_ids), max(token_ids)
    if low < 0 or high >= facts.vocab_size:
        wrong = low if low < 0 else high
        raise InvalidRequest(
            f"{param} must be token ids in [0, {facts.vocab_size}), got {wrong}", param=param
        )


def answer_sampling(
    sampling: SamplingParams, index: int, num_prompt_tokens: int, facts: EngineFacts
) -> SamplingParams:
    """For one of a prompt's answers: its own seed, a limit that ends with the context, and the log
    probabilities that it is ranked by."""
    room = facts.max_model_len - num_prompt_tokens
    limit = room if sampling.max_tokens is None else min(sampling.max_tokens, room)
    seed = sampling.seed
    if seed is not None and index > 0:
        seed = (seed + index) % _SEED_SPACE
    min_tokens = min(sampling.min_tokens, limit)
    logprobs = 0 if sampling.logprobs is None and sampling.is_ranked else sampling.logprobs
    return replace(
        sampling,
        n=1,
        best_of=None,
        seed=seed,
        max_tokens=limit,
        min_tokens=min_tokens,
        logprobs=logprobs,
    )
