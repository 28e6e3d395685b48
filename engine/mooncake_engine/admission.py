"""Rejects requests that the engine can't serve, before they reach the core."""

from __future__ import annotations

from itertools import chain

from mooncake_engine.errors import InvalidRequest
from mooncake_engine.messages import EngineInfo, EngineRequest
from mooncake_engine.sampling_params import SamplingParams
from mooncake_kv.params import TransferMode


def check_request(request: EngineRequest, info: EngineInfo, mode: TransferMode) -> None:
    """Check a request against the engine's limits and its KV connector, except its prompt: choices
    share that, see ``check_prompt``.

    Args:
        request: the request.
        info: static facts about the engine.
        mode: transfer mode of the engine's connector; NONE without a connector.

    Raises:
        InvalidRequest: the engine can't serve the request.
    """
    _check_named_tokens(request.sampling, info)
    if request.data_parallel_rank is not None and request.data_parallel_rank >= info.dp_size:
        raise InvalidRequest(
            f"data-parallel rank {request.data_parallel_rank} was requested, but this instance has "
            f"{info.dp_size} (--dp-size), counted from 0",
            param="X-data-parallel-rank",
        )
    params = request.kv_transfer_params
    _check_mode(params.mode, mode)
    if params.keeps_kv and not info.lends_kv:
        raise InvalidRequest(
            "a prefill for a peer was requested, but this decode instance keeps KV in a layout "
            "that only its own device can read; send the request to a prefill instance, or start "
            "this one with the name of a KV layout instead of 'auto' (--kv-layout)",
            param="kv_transfer_params",
        )
    if request.sampling.prompt_logprobs is not None and params.mode is not TransferMode.NONE:
        raise InvalidRequest(
            "prompt log probabilities require that one instance serves the whole request, because "
            "they are computed with the prompt; leave kv_transfer_params out",
            param="prompt_logprobs",
        )
    if params.first_token and not 0 <= params.first_token.token_id < info.vocab_size:
        raise InvalidRequest(
            f"last_token_id must be in [0, {info.vocab_size}), got {params.first_token.token_id}",
            param="kv_transfer_params",
        )


def _check_named_tokens(sampling: SamplingParams, info: EngineInfo) -> None:
    """Reject token ids outside the vocabulary: on a device they would crash the engine."""
    named = {
        "logit_bias": [token_id for token_id, _ in sampling.logit_bias],
        "allowed_token_ids": sampling.allowed_token_ids or (),
        "bad_words": list(chain.from_iterable(sampling.bad_words_token_ids)),
        "stop_token_ids": sampling.stop_token_ids,
    }
    for name, token_ids in named.items():
        for token_id in token_ids:
            if not 0 <= token_id < info.vocab_size:
                raise InvalidRequest(
                    f"{name} must be token ids in [0, {info.vocab_size}), got {token_id}",
                    param=name,
                )


def _check_mode(wanted: TransferMode, mode: TransferMode) -> None:
    if wanted is TransferMode.NONE or wanted is mode:
        return
    if mode is TransferMode.NONE:
        raise InvalidRequest(
            "this instance has no KV connector; start it with role 'prefill' or 'decode' (--role), "
            "or leave kv_transfer_params out",
            param="kv_transfer_params",
        )
    raise InvalidRequest(
        f"kv_transfer_params request a {wanted.value}, but this instance's KV connector does a "
        f"{mode.value}; run the same connector on all instances, and the proxy with its flow",
        param="kv_transfer_params",
    )
