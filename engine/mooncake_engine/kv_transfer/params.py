"""The field's ``kv_transfer_params``, parsed once, at the border.

Names as in vLLM and vLLM-Ascend's MooncakeConnectorV1, so that their proxies can stand in front
of our instances. ``last_token_id`` is the token that the prefill instance sampled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from hashlib import blake2b
from typing import Annotated, Any

import msgspec
import numpy as np

from mooncake_engine.errors import InvalidRequest
from mooncake_engine.messages import KVTransferParams, TokenLogprobs
from mooncake_engine.scheduling.request import FirstToken


@dataclass(frozen=True, slots=True)
class RemoteKV:
    """Where the KV of a prompt lies.

    Args:
        engine_id: the holder; another incarnation of it has another id.
        request_id: the holder's name for the lease.
        host, port: its side channel.
        block_ids: its block table.
        num_tokens: prompt tokens whose KV is there.
        told_tp_size, told_block_size: what the request says of the holder, if it does.
        lease_s: how long the holder waits for a sign of life, if the request says so.
    """

    engine_id: str
    request_id: str
    host: str
    port: int
    block_ids: tuple[int, ...]
    num_tokens: int
    told_tp_size: int | None = None
    told_block_size: int | None = None
    lease_s: float | None = None


class TransferMode(Enum):
    """Which way an instance's KV moves."""

    NONE = "none"
    PULL = "pull"
    """The decode instance reads, after the prefill."""
    PUSH = "push"
    """The prefill instance writes, while it computes."""


@dataclass(frozen=True, slots=True)
class PushTarget:
    """Where a prompt's KV is to be written.

    Args:
        remote: the blocks, and who reserved them under which name.
        start: the first token whose KV is not there yet.
    """

    remote: RemoteKV
    start: int


@dataclass(frozen=True, slots=True)
class Handoff:
    """What a request's parameters ask this instance to do.

    Args:
        keeps_kv: end after the first token, and keep the KV for a peer.
        remote: load the KV from there.
        first_token: the holder's token, to continue from.
        target: write the KV there.
        metaserver: reserve blocks, say so there, and wait for the KV and the first token.
        prompt_digest: of the prompt that the peer was given, if it says so.
    """

    keeps_kv: bool = False
    remote: RemoteKV | None = None
    first_token: FirstToken | None = None
    target: PushTarget | None = None
    metaserver: str | None = None
    prompt_digest: str | None = None

    @property
    def mode(self) -> TransferMode:
        """What an instance must be able to do to serve this."""
        if self.target is not None or self.metaserver is not None:
            return TransferMode.PUSH
        return TransferMode.PULL if self.keeps_kv or self.remote is not None else TransferMode.NONE


_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=512)]
_Port = Annotated[int, msgspec.Meta(ge=1, le=65_535)]
_Count = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
_Seconds = Annotated[float, msgspec.Meta(gt=0, le=86_400)]


class _Wire(msgspec.Struct):
    """The fields that we read; unknown ones belong to others and are left alone."""

    do_remote_decode: bool = False
    do_remote_prefill: bool = False
    remote_engine_id: _Name | None = None
    remote_request_id: _Name | None = None
    remote_host: _Name | None = None
    remote_port: _Port | None = None
    remote_block_ids: list[list[_Count]] | None = None
    num_prompt_tokens: _Count | None = None
    last_token_id: _Count | None = None
    last_token_logprobs: tuple[float, list[tuple[_Count, float]]] | None = None
    remote_cached_tokens: _Count = 0
    metaserver: _Name | None = None
    remote_ptp_size: _Count | None = None
    remote_tp_size: _Count | None = None
    remote_block_size: _Count | list[_Count] | None = None  # a push names one per cache group
    lease_seconds: _Seconds | None = None
    prompt_digest: _Name | None = None


ADDRESS = (
    "remote_engine_id",
    "remote_request_id",
    "remote_host",
    "remote_port",
    "remote_block_ids",
)
NEEDED = (*ADDRESS, "last_token_id")


def parse_handoff(params: KVTransferParams | None, num_prompt_tokens: int) -> Handoff:
    """Read a request's parameters.

    Args:
        params: as they came; None asks for nothing.
        num_prompt_tokens: of the request that carries them.

    Raises:
        InvalidRequest: a field is missing or of the wrong kind, or they contradict the prompt.
    """
    if params is None:
        return Handoff()
    try:
        wire = msgspec.convert(params, _Wire, strict=True)
    except msgspec.ValidationError as exc:
        raise _invalid(str(exc)) from exc
    if wire.do_remote_decode and wire.do_remote_prefill:
        raise _invalid("do_remote_decode and do_remote_prefill exclude each other")
    if wire.do_remote_decode:
        target = _parse_target(wire, num_prompt_tokens)
        return Handoff(keeps_kv=True, target=target, prompt_digest=wire.prompt_digest)
    if wire.do_remote_prefill and wire.metaserver and wire.remote_engine_id is None:
        return Handoff(metaserver=wire.metaserver)
    if wire.do_remote_prefill:
        return _parse_remote(wire, num_prompt_tokens)
    return Handoff()


def _parse_target(wire: _Wire, num_prompt_tokens: int) -> PushTarget | None:
    """Where a prefill is to write; None if it is to be fetched."""
    if wire.remote_engine_id is None:
        return None
    _check_address(
        wire, ADDRESS, "do_remote_decode", "pass on what the decode instance told the metaserver"
    )
    if wire.remote_cached_tokens > num_prompt_tokens:
        raise _invalid(
            f"remote_cached_tokens is {wire.remote_cached_tokens}, the prompt has only "
            f"{num_prompt_tokens} tokens"
        )
    _check_prompt(wire, num_prompt_tokens, "decode")
    return PushTarget(_remote(wire, num_prompt_tokens), wire.remote_cached_tokens)


def _check_address(wire: _Wire, names: tuple[str, ...], flag: str, advice: str) -> None:
    missing = [name for name in names if getattr(wire, name) is None]
    if missing:
        raise _invalid(f"{flag} needs {', '.join(missing)}; {advice}")
    assert wire.remote_block_ids is not None
    if len(wire.remote_block_ids) != 1:
        raise _invalid(
            f"remote_block_ids must hold the table of one KV-cache group, "
            f"got {len(wire.remote_block_ids)}"
        )


def _check_prompt(wire: _Wire, num_prompt_tokens: int, peer: str) -> None:
    told = wire.num_prompt_tokens
    if told is not None and told != num_prompt_tokens:
        raise _invalid(
            f"the {peer} instance counted {told} prompt tokens, this one {num_prompt_tokens}; "
            "the two must be given the same prompt, tokenizer and chat template"
        )


def _parse_remote(wire: _Wire, num_prompt_tokens: int) -> Handoff:
    _check_address(wire, NEEDED, "do_remote_prefill", "pass on what the prefill answered")
    _check_prompt(wire, num_prompt_tokens, "prefill")
    assert wire.last_token_id is not None
    first = FirstToken(wire.last_token_id, _logprobs(wire), wire.remote_cached_tokens)
    remote = _remote(wire, num_prompt_tokens)
    return Handoff(remote=remote, first_token=first, prompt_digest=wire.prompt_digest)


def _remote(wire: _Wire, num_tokens: int) -> RemoteKV:
    values: dict[str, Any] = {name: getattr(wire, f"remote_{name}") for name in _REMOTE_FIELDS}
    assert wire.remote_block_ids is not None
    return RemoteKV(
        **values,
        block_ids=tuple(wire.remote_block_ids[0]),
        num_tokens=num_tokens,
        told_tp_size=wire.remote_ptp_size or wire.remote_tp_size,
        told_block_size=_only_block_size(wire.remote_block_size),
        lease_s=wire.lease_seconds,
    )


def _only_block_size(told: int | list[int] | None) -> int | None:
    if not isinstance(told, list):
        return told
    if len(told) != 1:
        raise _invalid(f"remote_block_size must be that of one KV-cache group, got {told}")
    return told[0]


_REMOTE_FIELDS = ("engine_id", "request_id", "host", "port")


def _logprobs(wire: _Wire) -> TokenLogprobs | None:
    if wire.last_token_logprobs is None or wire.last_token_id is None:
        return None
    logprob, top = wire.last_token_logprobs
    return TokenLogprobs(wire.last_token_id, logprob, tuple(top))


def prompt_digest(token_ids: Sequence[int]) -> str:
    """A name for a prompt, the same whatever the block size; equal only for equal token ids."""
    return blake2b(np.asarray(token_ids, dtype="<u4").tobytes(), digest_size=16).hexdigest()


def check_prompt(handoff: Handoff, token_ids: Sequence[int]) -> None:
    """Refuse a prompt that is as long as the peer's and another one: its KV is not ours.

    Raises:
        InvalidRequest: the two differ; a peer that does not say what it was given is believed.
    """
    told = handoff.prompt_digest
    if told is None:
        return
    if told != (found := prompt_digest(token_ids)):
        raise _invalid(
            f"the peer was given another prompt of {len(token_ids)} tokens (digest {told}, here "
            f"{found}); send both instances the same request"
        )


def _invalid(problem: str) -> InvalidRequest:
    return InvalidRequest(f"kv_transfer_params: {problem}", param="kv_transfer_params")


@dataclass(frozen=True, slots=True)
class Holder:
    """What stays the same in all that an instance offers."""

    engine_id: str
    host: str
    port: int
    tp_size: int
    block_size: int
    lease_s: float


def build_params(
    holder: Holder,
    request_id: str,
    block_ids: list[int],
    prompt: Sequence[int],
    first: FirstToken,
) -> KVTransferParams:
    """What the decode instance needs to fetch this KV; the proxy carries it there.

    Args:
        holder: this prefill instance.
        request_id: its name for the lease.
        block_ids: the prompt's table.
        prompt: token ids.
        first: the token sampled here.
    """
    params: KVTransferParams = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": holder.engine_id,
        "remote_request_id": request_id,
        "remote_host": holder.host,
        "remote_port": holder.port,
        "remote_block_ids": [list(block_ids)],
        "remote_block_size": holder.block_size,
        "remote_ptp_size": holder.tp_size,
        "remote_pcp_size": 1,
        "remote_dcp_size": 1,
        "remote_multi_nodes_meta_mapping": {},
        "num_prompt_blocks": len(block_ids),
        "num_prompt_tokens": len(prompt),
        "prompt_digest": prompt_digest(prompt),
        "lease_seconds": holder.lease_s,
        "last_token_id": first.token_id,
        "remote_cached_tokens": first.num_cached_tokens,
    }
    if first.logprobs is not None:
        params["last_token_logprobs"] = [
            first.logprobs.logprob,
            [list(pair) for pair in first.logprobs.top],
        ]
    return params


def build_push_params(
    holder: Holder, request_id: str, block_ids: list[int], prompt: Sequence[int], start: int
) -> KVTransferParams:
    """What the prefill instance needs to write this KV; the metaserver carries it there.

    Args:
        holder: the decode instance.
        request_id: its name for the request.
        block_ids: what it reserved.
        prompt: token ids.
        start: the first token whose KV it lacks.
    """
    return {
        "token_ids": [],
        "do_remote_prefill": False,
        "do_remote_decode": True,
        "request_id": request_id,
        "remote_request_id": request_id,
        "remote_engine_id": holder.engine_id,
        "remote_host": holder.host,
        "remote_port": holder.port,
        "remote_block_ids": [list(block_ids)],
        "remote_block_size": [holder.block_size],
        "remote_tp_size": holder.tp_size,
        "remote_pcp_size": 1,
        "remote_dcp_size": 1,
        "remote_cached_tokens": start,
        "num_prompt_tokens": len(prompt),
        "prompt_digest": prompt_digest(prompt),
        "lease_seconds": holder.lease_s,
    }
