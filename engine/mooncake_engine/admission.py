"""Whether a request can be served at all, decided before the core hears of it."""

from __future__ import annotations

from mooncake_engine.errors import InvalidRequest, PromptTooLong
from mooncake_engine.kv_transfer.params import Handoff, TransferMode, check_prompt, parse_handoff
from mooncake_engine.messages import EngineFacts, EngineRequest
from mooncake_engine.sampling_params import SamplingParams


def check_request(request: EngineRequest, facts: EngineFacts, mode: TransferMode) -> Handoff:
    """Check a request against what the engine can do.

    Returns:
        What its ``kv_transfer_params`` ask for.

    Raises:
        InvalidRequest: says what is wrong.
        PromptTooLong: the prompt leaves no room for an answer.
    """
    prompt = request.prompt_token_ids
    if not prompt:
        raise InvalidRequest("the prompt has no tokens; give it at least one", param="prompt")
    if len(prompt) >= facts.max_model_len:
        raise PromptTooLong(
            f"the prompt has {len(prompt)} tokens, but prompt and answer together may have "
            f"{facts.max_model_len}; shorten the prompt",
            param="prompt",
        )
    if not min(prompt) >= 0 or max(prompt) >= facts.vocab_size:
        raise InvalidRequest(
            f"token ids must be in [0, {facts.vocab_size}), got {min(prompt)} to {max(prompt)}",
            param="prompt",
        )
    _check_named_tokens(request.sampling, facts)
    handoff = parse_handoff(request.kv_transfer_params, len(prompt))
    _check_mode(handoff.mode, mode)
    if handoff.keeps_kv and not facts.lends_kv:
        raise InvalidRequest(
            "a prefill for a peer was asked for, but this decode instance keeps KV in a form that "
            "only its own device reads; ask a prefill instance, or start this one with the KV "
            "layout's name instead of 'auto'",
            param="kv_transfer_params",
        )
    check_prompt(handoff, prompt)
    if request.sampling.prompt_logprobs is not None and handoff.mode is not TransferMode.NONE:
        raise InvalidRequest(
            "log probabilities of the prompt are computed with the prompt: one instance has to "
            "serve the whole request; leave kv_transfer_params out",
            param="prompt_logprobs",
        )
    if handoff.first_token and not 0 <= handoff.first_token.token_id < facts.vocab_size:
        raise InvalidRequest(
            f"last_token_id must be in [0, {facts.vocab_size}), got {handoff.first_token.token_id}",
            param="kv_transfer_params",
        )
    return handoff


def _check_named_tokens(sampling: SamplingParams, facts: EngineFacts) -> None:
    """Refuse ids outside the vocabulary: on a device they would end the engine, not the request."""
    named = {
        "logit_bias": [token_id for token_id, _ in sampling.logit_bias],
        "stop_token_ids": sampling.stop_token_ids,
    }
    for name, token_ids in named.items():
        for token_id in token_ids:
            if not 0 <= token_id < facts.vocab_size:
                raise InvalidRequest(
                    f"{name} must be token ids in [0, {facts.vocab_size}), got {token_id}",
                    param=name,
                )


def _check_mode(wanted: TransferMode, mode: TransferMode) -> None:
    if wanted is TransferMode.NONE or wanted is mode:
        return
    if mode is TransferMode.NONE:
        raise InvalidRequest(
            "this instance works alone: it has no KV connector; start it with a role of "
            "'prefill' or 'decode', or leave kv_transfer_params out",
            param="kv_transfer_params",
        )
    raise InvalidRequest(
        f"kv_transfer_params ask for a {wanted.value}, this instance's KV connector is made to "
        f"{mode.value}; run the same connector on all instances, and the proxy with its flow",
        param="kv_transfer_params",
    )
