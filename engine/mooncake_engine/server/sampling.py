"""Sampling parameters from a request's fields."""

from __future__ import annotations

from dataclasses import replace

from mooncake_engine.errors import InvalidRequest
from mooncake_engine.messages import EngineFacts
from mooncake_engine.sampling_params import SamplingParams
from mooncake_engine.server.protocol import ChatRequest, CompletionRequest, GenerationFields

_SAME_NAME = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "ignore_eos",
    "min_tokens",
    "prompt_logprobs",
    "skip_special_tokens",
    "include_stop_str_in_output",
)
_MAX_STOPS = 64


def completion_sampling(request: CompletionRequest, facts: EngineFacts) -> SamplingParams:
    """Of a completion; ``max_tokens`` is 16 unless given.

    Raises:
        InvalidRequest: a value out of range, or a combination that is not served.
    """
    _check_ranking(request)
    max_tokens = 16 if request.max_tokens is None else request.max_tokens
    if is_prompt_only(request):
        max_tokens = 1  # and nobody sees it
    sampling = _sampling(request, facts, max_tokens=max_tokens, logprobs=request.logprobs)
    if request.best_of is not None:
        sampling = replace(sampling, best_of=request.best_of)
    if not request.echo or request.logprobs is None:
        return sampling
    return replace(sampling, prompt_logprobs=max(request.logprobs, request.prompt_logprobs or 0))


def _check_ranking(request: CompletionRequest) -> None:
    if request.use_beam_search:
        raise InvalidRequest(
            "beam search is not served here: best_of returns the most probable of several sampled "
            "answers, temperature 0 the greedy one",
            param="use_beam_search",
        )
    if request.stream and (request.best_of or 1) > (request.n or 1):
        raise InvalidRequest(
            f"best_of {request.best_of} of n {request.n or 1} can't be streamed: which answers are "
            "best is known at the end; leave stream or best_of out",
            param="best_of",
        )


def is_prompt_only(request: CompletionRequest) -> bool:
    """Whether the client wants its prompt told, and no new token: ``max_tokens`` 0."""
    tells_prompt = request.echo or request.prompt_logprobs is not None
    return request.max_tokens == 0 and bool(tells_prompt)


def chat_sampling(request: ChatRequest, facts: EngineFacts) -> SamplingParams:
    """Of a chat completion; without a limit it goes on to the context's end.

    Raises:
        InvalidRequest: a value out of range, or a combination that is not served.
    """
    if request.top_logprobs is not None and not request.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs: true", param="top_logprobs")
    limit = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
    max_tokens: int | None = getattr(request, limit)
    if max_tokens is not None and max_tokens < 1:
        raise InvalidRequest(f"{limit} must be at least 1, got {max_tokens}", param=limit)
    logprobs = (request.top_logprobs or 0) if request.logprobs else None
    return _sampling(request, facts, max_tokens=max_tokens, logprobs=logprobs)


def _sampling(
    request: GenerationFields,
    facts: EngineFacts,
    *,
    max_tokens: int | None,
    logprobs: int | None,
) -> SamplingParams:
    if request.store:
        raise InvalidRequest("answers are not stored here: leave store out", param="store")
    given = {name: value for name in _SAME_NAME if (value := getattr(request, name)) is not None}
    if request.prompt_logprobs is not None and request.stream:
        raise InvalidRequest(
            "prompt_logprobs come with whole answers: use stream: false, or echo with logprobs",
            param="prompt_logprobs",
        )
    stop_token_ids = tuple(request.stop_token_ids or ())
    logit_bias = tuple((request.logit_bias or {}).items())
    _check_token_ids("stop_token_ids", stop_token_ids, facts)
    _check_token_ids("logit_bias", [token_id for token_id, _ in logit_bias], facts)
    for token_id, bias in logit_bias:
        if not -100.0 <= bias <= 100.0:
            raise InvalidRequest(
                f"logit_bias must be in [-100, 100], got {bias} for token {token_id}",
                param="logit_bias",
            )
    return SamplingParams(
        **given,
        stop=_stops(request.stop),
        stop_token_ids=stop_token_ids,
        max_tokens=max_tokens,
        logprobs=logprobs,
        logit_bias=logit_bias,
    )


def _stops(stop: str | list[str] | None) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(stops) > _MAX_STOPS:
        raise InvalidRequest(
            f"stop must hold at most {_MAX_STOPS} strings, got {len(stops)}", param="stop"
        )
    return stops


def _check_token_ids(name: str, token_ids: tuple[int, ...] | list[int], facts: EngineFacts) -> None:
    for token_id in token_ids:
        if not 0 <= token_id < facts.vocab_size:
            raise InvalidRequest(
                f"{name} must be token ids in [0, {facts.vocab_size}), got {token_id}", param=name
            )
