"""Parses and builds the ``kv_transfer_params`` of requests and responses: whether a peer continues
an answer that this instance prefills, or this instance continues one that a peer has prefilled.

The fields are those that vLLM's proxies use, plus our own: ``created``, ``choices`` (one entry per
answer where a request has several) and ``first_token_delivered``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from mooncake_engine.errors import InvalidRequest
from mooncake_engine.messages import TokenUpdate
from mooncake_kv.params import FirstToken, KVTransferDict

_PARAM = "kv_transfer_params"
_PROMPT = "prompt_token_ids"
_SOURCES = "prefix_sources"


@dataclass(frozen=True, slots=True)
class KVTransferRequest:
    """How this instance and a peer share the work of one request.

    Args:
        is_outgoing: this instance prefills, and a peer continues.
        is_incoming: a peer has prefilled, and this instance continues.
        is_first_delivered: the client has already received the text of the peer's first token.
        created: Unix time at which the peer started, so that ``created`` stays the same in all
            responses to the client.
        num_cached_tokens: tokens of the prompt that the peer had cached.
        tokenizer: fingerprint of the peer's tokenizer, if the peer sent one.
        is_shared: the peer has prefilled once for several answers, and sampled one token.
        choices: for each answer, the parameters that the core receives.
    """

    is_outgoing: bool = False
    is_incoming: bool = False
    is_first_delivered: bool = False
    created: int | None = None
    num_cached_tokens: int | None = None
    tokenizer: str | None = None
    is_shared: bool = False
    choices: tuple[KVTransferDict | None, ...] = ()

    def params(self, index: int) -> KVTransferDict | None:
        """The core's parameters for answer ``index``; None if it involves no transfer."""
        return self.choices[index] if self.choices else None

    def begins_with(self, first: FirstToken, *, wants_logprobs: bool) -> bool:
        """Whether an answer starts with the token that the peer has sampled.

        Otherwise this instance samples the first token itself, from the peer's KV. It does so if
        several answers continue one prompt, because the peer's single token belongs to none of
        them, and if the client wants log probabilities that the peer, such as vLLM, did not
        send."""
        if self.is_first_delivered:
            return True
        return not self.is_shared and (first.logprobs is not None or not wants_logprobs)

    def finished_update(self, index: int) -> TokenUpdate | None:
        """Answer ``index`` in full, if it finished at the peer while others continue here."""
        params = self.params(index)
        if params is None or "finished_update" not in params:
            return None
        try:
            return msgspec.convert(params["finished_update"], TokenUpdate)
        except msgspec.ValidationError as exc:
            raise InvalidRequest(f"{_PARAM}.finished_update: {exc}", param=_PARAM) from exc


def read_kv_transfer_request(
    params: KVTransferDict | None, num_choices: int, *, stream: bool
) -> KVTransferRequest:
    """Parse and validate a request's ``kv_transfer_params``.

    Raises:
        InvalidRequest: the parameters contradict each other or the request.
    """
    if not params:
        return KVTransferRequest()
    is_outgoing = _flag(params, "do_remote_decode")
    is_incoming = _flag(params, "do_remote_prefill")
    if is_outgoing and is_incoming:
        raise InvalidRequest(
            "do_remote_decode and do_remote_prefill exclude each other", param=_PARAM
        )
    if not is_outgoing and not is_incoming:
        if _SOURCES not in params:
            return KVTransferRequest()
        return KVTransferRequest(choices=({_SOURCES: params[_SOURCES]},) * num_choices)
    if is_outgoing and stream:
        raise InvalidRequest(
            "a prefill for another instance (do_remote_decode) needs stream: false", param="stream"
        )
    return KVTransferRequest(
        is_outgoing=is_outgoing,
        is_incoming=is_incoming,
        is_first_delivered=is_incoming and _flag(params, "first_token_delivered"),
        created=_count(params, "created"),
        num_cached_tokens=_count(params, "remote_cached_tokens") if is_incoming else None,
        tokenizer=params.get("tokenizer_fingerprint") if is_incoming else None,
        is_shared=is_incoming and num_choices > 1 and params.get("choices") is None,
        choices=_choices(params, num_choices),
    )


def is_prefill(params: KVTransferDict | None) -> bool:
    """Whether a router asks for the first token only, and for the KV to be kept for a decode
    instance."""
    return params is not None and _flag(params, "do_remote_decode")


def prompt_of_peer(
    params: KVTransferDict | None, tokenizer: str, num_generated: int = 0
) -> tuple[int, ...] | None:
    """The prompt's token ids, if the peer that received the request first has tokenised it with the
    same tokenizer. None if the parameters hold no usable ids, and the prompt must be tokenised.

    Args:
        tokenizer: fingerprint of this instance's tokenizer.
        num_generated: generated tokens that the peer's ids end with.

    Raises:
        InvalidRequest: the ids are not a list of numbers.
    """
    if not params or _PROMPT not in params:
        return None
    if not (params.get("do_remote_prefill") or params.get("do_remote_decode")):
        return None
    if params.get("tokenizer_fingerprint") != tokenizer:
        return None
    try:
        found = msgspec.convert(params[_PROMPT], tuple[int, ...])
    except msgspec.ValidationError as exc:
        raise InvalidRequest(f"{_PARAM}.{_PROMPT}: {exc}", param=_PARAM) from exc
    return found[: max(0, len(found) - num_generated)]


def check_same_tokenizer(kv_transfer: KVTransferRequest, tokenizer: str) -> None:
    """Raises InvalidRequest if the peer's tokenizer or chat template differs from ours."""
    if kv_transfer.tokenizer is not None and kv_transfer.tokenizer != tokenizer:
        raise InvalidRequest(
            f"the prefill instance's tokenizer or chat template is {kv_transfer.tokenizer}, this "
            f"instance's is {tokenizer}: serve the same model directory on both",
            param=_PARAM,
        )


def kv_transfer_response(
    last_updates: Sequence[TokenUpdate | KVTransferDict], common: dict[str, Any]
) -> KVTransferDict | None:
    """The ``kv_transfer_params`` of a prefill instance's response; None if every answer finished
    here.

    Args:
        last_updates: for each answer, the core's parameters, or the whole answer if it finished
            here.
        common: fields of the top level: ``created``, ``remote_cached_tokens``, ...
    """
    choices = [
        {"do_remote_prefill": False, "finished_update": msgspec.to_builtins(answer)}
        if isinstance(answer, TokenUpdate)
        else answer
        for answer in last_updates
    ]
    continuing = [params for params in choices if params["do_remote_prefill"]]
    if not continuing:
        return None
    top = {**common, **continuing[0]}
    return top if len(choices) == 1 else {**top, "choices": choices}


def _choices(params: KVTransferDict, num_choices: int) -> tuple[KVTransferDict | None, ...]:
    if num_choices == 1:
        return (params,)
    choices = params.get("choices")
    if choices is None and _flag(params, "do_remote_decode"):
        return (params,) * num_choices
    if choices is None and not _flag(params, "first_token_delivered"):
        # One reservation or lease serves all answers: the others wait for the prompt's KV, and
        # sample their first tokens from it here.
        return (params, *(None,) * (num_choices - 1))
    if not isinstance(choices, list) or len(choices) != num_choices:
        raise InvalidRequest(
            f"{_PARAM}.choices must have one entry for each of {num_choices} answers", param=_PARAM
        )
    if not all(isinstance(choice, dict) for choice in choices):
        raise InvalidRequest(f"{_PARAM}.choices must hold objects", param=_PARAM)
    return tuple(choices)


def _flag(params: KVTransferDict, name: str) -> bool:
    value = params.get(name)
    if value is not None and not isinstance(value, bool):
        raise InvalidRequest(f"{_PARAM}.{name} must be true or false, got {value!r}", param=_PARAM)
    return bool(value)


def _count(params: KVTransferDict, name: str) -> int | None:
    value = params.get(name)
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
        raise InvalidRequest(f"{_PARAM}.{name} must be a count, got {value!r}", param=_PARAM)
    return value
