"""Checks prompts and choices against the limits of an engine; server and ``LLM`` use it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from mooncake_engine.errors import InvalidRequest, PromptTooLong
from mooncake_engine.messages import EngineInfo
from mooncake_engine.sampling_params import SamplingParams

_SEED_SPACE = 2**63
_MIN_TEXT_LIMIT = 64 << 10
_CHARACTERS_PER_TOKEN = 32
"""More characters per token than any text has on average: English has 4 to 5, indented code up to
10. Tokenising takes about 200 bytes of memory per character, so that texts which can't fit are
rejected before they are tokenised."""


_BYTES_PER_CHARACTER = 6
"""Bytes of the longest JSON escape of a character (``\\uXXXX``)."""
_EXTRA_BODY_BYTES = 8 << 20
"""Bytes of a body that are allowed beside one prompt: enough for the longest grammar, or for the
most ids to detokenise."""
_MAX_BODY_BYTES = 64 << 20


def longest_text(info: EngineInfo) -> int:
    """The number of characters beyond which no text fits the context, however it is tokenised."""
    return max(_MIN_TEXT_LIMIT, _CHARACTERS_PER_TOKEN * info.max_model_len)


def longest_body(info: EngineInfo) -> int:
    """The default limit of a request's body, in bytes."""
    prompt_bytes = _BYTES_PER_CHARACTER * longest_text(info)
    return min(_EXTRA_BODY_BYTES + prompt_bytes, _MAX_BODY_BYTES)


def check_text_size(num_characters: int, info: EngineInfo, *, param: str) -> None:
    """Raises PromptTooLong for a text that can't fit the context, however it is tokenised."""
    limit = longest_text(info)
    if num_characters > limit:
        raise _too_long(f"{num_characters} characters", limit, info, param)


def check_prompt(token_ids: Sequence[int], info: EngineInfo, *, param: str) -> None:
    """Raises InvalidRequest or PromptTooLong for a prompt that the engine can't continue."""
    if not token_ids:
        raise InvalidRequest(f"{param} is empty: at least one token is needed", param=param)
    if len(token_ids) >= info.max_model_len:
        raise _too_long(f"{len(token_ids)} tokens", info.max_model_len - 1, info, param)
    low, high = min(token_ids), max(token_ids)
    if low < 0 or high >= info.vocab_size:
        wrong = low if low < 0 else high
        raise InvalidRequest(
            f"{param} must be token ids in [0, {info.vocab_size}), got {wrong}", param=param
        )


def _too_long(found: str, limit: int, info: EngineInfo, param: str) -> PromptTooLong:
    """Begins like OpenAI's and vLLM's message and goes on like Anthropic's: gateways and agents
    look for either text to choose another model, or to shorten the conversation."""
    return PromptTooLong(
        f"This model's maximum context length is {info.max_model_len} tokens. However, your "
        f"prompt is too long: {found} > {limit} maximum; shorten {param}",
        param=param,
    )


@dataclass(frozen=True, slots=True)
class Truncation:
    """How prompts are truncated, as in vLLM.

    Args:
        num_tokens: the most tokens of a prompt.
        side: the side whose tokens are removed; None removes those on the left, but keeps special
            tokens that the tokenizer has put around a text.
    """

    num_tokens: int
    side: str | None = None

    @classmethod
    def of(cls, num_tokens: int | None, side: str | None, info: EngineInfo) -> Truncation | None:
        """The truncation that ``truncate_prompt_tokens`` asks for; -1 is the longest prompt that
        leaves room for an output.

        Raises:
            InvalidRequest: more tokens than the context has.
        """
        if num_tokens is None:
            return None
        if not -1 <= num_tokens <= info.max_model_len:
            raise InvalidRequest(
                f"truncate_prompt_tokens must be in [-1, {info.max_model_len}], got {num_tokens}",
                param="truncate_prompt_tokens",
            )
        return cls(info.max_model_len - 1 if num_tokens == -1 else num_tokens, side)

    def of_tokens(self, token_ids: tuple[int, ...]) -> tuple[int, ...]:
        """The tokens that remain of a prompt given as tokens."""
        if self.side == "right":
            return token_ids[: self.num_tokens]
        return token_ids[max(0, len(token_ids) - self.num_tokens) :]

    def of_text(
        self, token_ids: tuple[int, ...], encode_plain: Callable[[], tuple[int, ...]]
    ) -> tuple[int, ...]:
        """The tokens that remain of a text.

        Args:
            token_ids: the tokens of the text.
            encode_plain: returns them without special tokens around them.
        """
        if self.side is not None or len(token_ids) <= self.num_tokens:
            return self.of_tokens(token_ids)
        plain = encode_plain()
        num_special = len(token_ids) - len(plain)
        num_kept = self.num_tokens - num_special
        if num_kept <= 0:
            return self.of_tokens(token_ids)
        before = next(i for i in range(num_special + 1) if token_ids[i : i + len(plain)] == plain)
        kept = plain[len(plain) - num_kept :]
        return (*token_ids[:before], *kept, *token_ids[before + len(plain) :])


def choice_sampling(
    sampling: SamplingParams,
    index: int,
    num_prompt_tokens: int,
    info: EngineInfo,
    *,
    num_generated: int = 0,
) -> SamplingParams:
    """The sampling parameters of one choice of a prompt: with its own seed, a token limit that fits
    the context, and the log probabilities needed to rank it.

    Args:
        sampling: the parameters of the request, whose limits count new tokens.
        index: the choice's index among those of its prompt.
        num_prompt_tokens: the length of the prompt.
        info: the engine's limits.
        num_generated: output that the prompt ends with, which the choice's limits count, too.
    """
    room = info.max_model_len - num_prompt_tokens
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
        max_tokens=limit + num_generated,
        min_tokens=min_tokens and min_tokens + num_generated,
        logprobs=logprobs,
    )
