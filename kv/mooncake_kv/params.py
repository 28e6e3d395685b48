"""Parses and builds ``kv_transfer_params``. They are parsed once, where a request enters.

Field names are those of vLLM and of vLLM-Ascend's MooncakeConnectorV1, so that their proxies can be
used with our instances. ``last_token_id`` is the token that the prefill instance sampled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from hashlib import blake2b
from itertools import chain
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np

from mooncake_kv.errors import InvalidKVParams

_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=512)]
_Port = Annotated[int, msgspec.Meta(ge=1, le=65_535)]
_Count = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
_Seconds = Annotated[float, msgspec.Meta(gt=0, le=86_400)]

KVTransferDict = dict[str, Any]
"""``kv_transfer_params`` as a JSON object, to or from a proxy."""


class FirstTokenLogprobs(NamedTuple):
    """Log probabilities of a first token (natural log).

    Args:
        logprob: log probability of the token itself.
        top: the most probable tokens and their log probabilities, best first.
    """

    logprob: float
    top: tuple[tuple[_Count, float], ...]


class FirstToken(msgspec.Struct, frozen=True):
    """The token that a prefill instance sampled, from which a decode instance continues.

    Args:
        token_id: the token.
        logprobs: its log probabilities, if the request asked for them.
        num_cached_tokens: prompt tokens that the prefill instance had cached.
    """

    token_id: int
    logprobs: FirstTokenLogprobs | None = None
    num_cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class RemoteKV:
    """The location of a prompt's KV at a peer.

    Args:
        engine_id: the holder's epoch; a restarted holder has another one.
        request_id: the holder's name for the request.
        host, port: address of its side channel.
        block_ids: its block table; if there are several KV-cache groups, their entries alternate.
        num_tokens: number of prompt tokens whose KV it holds.
        claimed_tp_size, claimed_block_size, claimed_num_groups: properties of the holder as the
            request's parameters claim them; None if they don't.
        lease_s: how long the holder waits for a keepalive, in seconds, if the parameters say so.
    """

    engine_id: str
    request_id: str
    host: str
    port: int
    block_ids: tuple[int, ...]
    num_tokens: int
    claimed_tp_size: int | None = None
    claimed_block_size: int | None = None
    claimed_num_groups: int | None = None
    lease_s: float | None = None


class TransferMode(Enum):
    """How a request's KV moves between instances."""

    NONE = "none"
    PULL = "pull"
    """The decode instance reads it: after the prefill, or chunk by chunk during it."""
    PUSH = "push"
    """The prefill instance writes it while it computes."""


@dataclass(frozen=True, slots=True)
class PushTarget:
    """The blocks that a decode instance has reserved for a prompt's KV.

    Args:
        remote: the blocks, and the instance that reserved them.
        start: the first token whose KV is missing there.
        prompt_digest: digest of the prompt that this instance was given.
    """

    remote: RemoteKV
    start: int
    prompt_digest: str = ""


@dataclass(frozen=True, slots=True)
class PrefixSource:
    """A hint that a node store has the KV of a prompt's prefix. If the hint is wrong, or loading
    takes too long, the prompt is computed.

    Args:
        host, port: address of the store.
        epoch: the store's epoch when the hint was made; a restarted store has another one.
        num_tokens: number of leading tokens whose KV it has.
    """

    host: _Name
    port: _Port
    epoch: _Name
    num_tokens: _Count

    def __post_init__(self) -> None:
        if not _is_host(self.host):
            raise ValueError(f"host: {_wanted_host(self.host)}")


MAX_PREFIX_SOURCES = 16


@dataclass(frozen=True, slots=True)
class KVTransferParams:
    """A request's parsed parameters: what this instance is asked to do with its KV.

    Args:
        keeps_kv: stop after the first token, and keep the KV for a peer.
        remote: load the KV from there.
        first_token: the holder's token, from which to continue; None if it is sampled again here.
        target: reserved blocks of a peer, to which the KV goes while it is computed.
        metaserver: reserve blocks, post them to this URL, and wait for the KV and the first token.
        is_pulled: whether the instance that has reserved blocks reads the KV into them (early
            pull); otherwise the KV is written to them (push).
        requester: the address that the request came from; None for a request of this process.
        is_verified: whether the holder has named the prompt that it was given, so that its KV is
            certainly this prompt's.
        prefix_sources: stores where this instance's KVCache pool may find the KV of the prompt.
        tokenizer: fingerprint of the tokenizer that made the prompt from text, for the metaserver;
            empty if the client sent token ids.
    """

    keeps_kv: bool = False
    remote: RemoteKV | None = None
    first_token: FirstToken | None = None
    target: PushTarget | None = None
    metaserver: str | None = None
    is_pulled: bool = False
    requester: str | None = None
    is_verified: bool = True
    prefix_sources: tuple[PrefixSource, ...] = ()
    tokenizer: str = ""

    @property
    def loads_kv(self) -> bool:
        """Whether the prompt's KV comes from a peer."""
        return self.remote is not None or self.metaserver is not None

    @property
    def mode(self) -> TransferMode:
        """The transfer mode that an instance must support to serve this request."""
        if self.target is not None or self.metaserver is not None:
            return TransferMode.PULL if self.is_pulled else TransferMode.PUSH
        return TransferMode.PULL if self.keeps_kv or self.remote is not None else TransferMode.NONE


NO_KV_TRANSFER = KVTransferParams()
"""The parameters of a request that is served by a single instance."""


class _Wire(msgspec.Struct):
    """The JSON fields that we read; unknown fields belong to other systems and are ignored."""

    do_remote_decode: bool = False
    do_remote_prefill: bool = False
    remote_engine_id: _Name | None = None
    remote_request_id: _Name | None = None
    remote_host: _Name | None = None
    remote_port: _Port | None = None
    remote_block_ids: list[list[_Count]] | None = None
    num_prompt_tokens: _Count | None = None
    last_token_id: _Count | None = None
    last_token_logprobs: FirstTokenLogprobs | None = None
    remote_cached_tokens: _Count = 0
    metaserver: _Name | None = None
    do_pull: bool = False
    remote_ptp_size: _Count | None = None
    remote_tp_size: _Count | None = None
    remote_block_size: _Count | list[_Count] | None = None  # a push names one per cache group
    lease_seconds: _Seconds | None = None
    prompt_digest: _Name | None = None
    prefix_sources: Annotated[
        tuple[PrefixSource, ...], msgspec.Meta(max_length=MAX_PREFIX_SOURCES)
    ] = ()


ADDRESS_FIELDS = (
    "remote_engine_id",
    "remote_request_id",
    "remote_host",
    "remote_port",
    "remote_block_ids",
)
REMOTE_PREFILL_FIELDS = (*ADDRESS_FIELDS, "last_token_id")


def parse_kv_transfer_params(
    params: KVTransferDict | None, prompt_token_ids: Sequence[int], cache_salt: str = ""
) -> KVTransferParams:
    """Parse a request's parameters. Called once, where the request enters.

    Args:
        params: the JSON object as received; None if there is none.
        prompt_token_ids: the request's prompt. The peer must have been given a prompt of the same
            length, and the same prompt if it has sent a ``prompt_digest``.
        cache_salt: the request's cache salt; must be the same at the peer.

    Raises:
        InvalidKVParams: a field is missing or has the wrong type, or contradicts the prompt.
    """
    if params is None:
        return NO_KV_TRANSFER
    try:
        wire = msgspec.convert(params, _Wire, strict=True)
    except msgspec.ValidationError as exc:
        raise _invalid(str(exc)) from exc
    if wire.do_remote_decode and wire.do_remote_prefill:
        raise _invalid("do_remote_decode and do_remote_prefill exclude each other")
    num_prompt_tokens = len(prompt_token_ids)
    if wire.do_remote_decode:
        target = _parse_target(wire, num_prompt_tokens)
        is_pulled = target is not None and wire.do_pull
        found = KVTransferParams(
            keeps_kv=True,
            target=target,
            is_pulled=is_pulled,
            prefix_sources=wire.prefix_sources,
        )
    elif wire.do_remote_prefill and wire.metaserver and wire.remote_engine_id is None:
        return KVTransferParams(metaserver=wire.metaserver, is_pulled=wire.do_pull)
    elif wire.do_remote_prefill:
        found = _parse_remote(wire, num_prompt_tokens)
    else:
        return KVTransferParams(prefix_sources=wire.prefix_sources)
    if wire.prompt_digest is None and found.target is None:
        return found  # a peer that sends no digest is trusted
    digest = prompt_digest(prompt_token_ids, cache_salt)
    if wire.prompt_digest is not None:
        _check_digest(wire.prompt_digest, digest, num_prompt_tokens)
    target = found.target and replace(found.target, prompt_digest=digest)
    return replace(found, target=target)


def parse_remote_address(params: KVTransferDict) -> RemoteKV | None:
    """Find the holder of the KV of a request that will not run here, in order to notify it.

    Other errors in the parameters are ignored; returns None if they name no holder.
    """
    try:
        wire = msgspec.convert(params, _Wire, strict=True)
        if not wire.do_remote_prefill:
            return None
        _check_address(wire, ADDRESS_FIELDS, "do_remote_prefill", "name the holder")
        return _remote(wire, num_tokens=0)
    except (msgspec.ValidationError, InvalidKVParams):
        return None


def parse_reservation(params: KVTransferDict) -> KVTransferParams | None:
    """Find the blocks that a decode instance has reserved for a prompt that will not be computed
    for it, in order to notify it.

    Other errors in the parameters are ignored; returns None if they name no reserved blocks.
    """
    try:
        wire = msgspec.convert(params, _Wire, strict=True)
        if wire.do_remote_prefill or not wire.do_remote_decode:
            return None
        _check_address(wire, ADDRESS_FIELDS, "do_remote_decode", "name the reserved blocks")
        # By the digest, the decode instance recognises its own reservation, whatever was sent here.
        target = PushTarget(_remote(wire, num_tokens=0), 0, wire.prompt_digest or "")
    except (msgspec.ValidationError, InvalidKVParams):
        return None
    return KVTransferParams(keeps_kv=True, target=target, is_pulled=wire.do_pull)


def _parse_target(wire: _Wire, num_prompt_tokens: int) -> PushTarget | None:
    """The target of a prefill; None if the KV is to be fetched after it."""
    if wire.remote_engine_id is None:
        return None
    _check_address(
        wire,
        ADDRESS_FIELDS,
        "do_remote_decode",
        "pass on the parameters that the decode instance posted to the metaserver",
    )
    if wire.remote_cached_tokens > num_prompt_tokens:
        raise _invalid(
            f"remote_cached_tokens is {wire.remote_cached_tokens}, the prompt has only "
            f"{num_prompt_tokens} tokens"
        )
    _check_num_tokens(wire, num_prompt_tokens, "decode")
    return PushTarget(_remote(wire, num_prompt_tokens), wire.remote_cached_tokens)


def _check_address(wire: _Wire, names: tuple[str, ...], flag: str, advice: str) -> None:
    missing = [name for name in names if getattr(wire, name) is None]
    if missing:
        raise _invalid(f"{flag} needs {', '.join(missing)}; {advice}")
    assert wire.remote_block_ids is not None
    if not _is_host(wire.remote_host or ""):
        raise _invalid(f"remote_host: {_wanted_host(wire.remote_host or '')}")
    lengths = {len(table) for table in wire.remote_block_ids}
    if len(lengths) != 1:
        raise _invalid(
            "remote_block_ids must hold a table for each KV-cache group, all of one length; got "
            f"{len(wire.remote_block_ids)} of lengths {sorted(lengths)}"
        )


def _is_host(text: str) -> bool:
    """Whether the text can be a host: a name that IDNA can't encode can't be resolved."""
    try:
        text.encode("idna")
    except UnicodeError:
        return False
    return bool(text) and "\0" not in text


def _wanted_host(found: str) -> str:
    return (
        "wanted a host's name or address, with labels of 1 to 63 characters between dots, got "
        f"{found[:80]!r}"
    )


def _check_num_tokens(wire: _Wire, num_prompt_tokens: int, peer: str) -> None:
    counted = wire.num_prompt_tokens
    if counted is not None and counted != num_prompt_tokens:
        raise _invalid(
            f"the {peer} instance counted {counted} prompt tokens, this one {num_prompt_tokens}; "
            "the two must be given the same prompt, tokenizer and chat template"
        )


def _parse_remote(wire: _Wire, num_prompt_tokens: int) -> KVTransferParams:
    _check_address(
        wire,
        REMOTE_PREFILL_FIELDS,
        "do_remote_prefill",
        "pass on the parameters of the prefill instance's answer",
    )
    _check_num_tokens(wire, num_prompt_tokens, "prefill")
    assert wire.last_token_id is not None
    first = FirstToken(wire.last_token_id, wire.last_token_logprobs, wire.remote_cached_tokens)
    remote = _remote(wire, num_prompt_tokens)
    is_verified = wire.prompt_digest is not None
    return KVTransferParams(remote=remote, first_token=first, is_verified=is_verified)


def _remote(wire: _Wire, num_tokens: int) -> RemoteKV:
    assert wire.remote_engine_id is not None
    assert wire.remote_request_id is not None
    assert wire.remote_host is not None
    assert wire.remote_port is not None
    assert wire.remote_block_ids is not None
    return RemoteKV(
        engine_id=wire.remote_engine_id,
        request_id=wire.remote_request_id,
        host=wire.remote_host,
        port=wire.remote_port,
        block_ids=tuple(chain.from_iterable(zip(*wire.remote_block_ids, strict=True))),
        num_tokens=num_tokens,
        claimed_tp_size=wire.remote_ptp_size or wire.remote_tp_size,
        claimed_block_size=_only_block_size(wire.remote_block_size),
        claimed_num_groups=len(wire.remote_block_ids),
        lease_s=wire.lease_seconds,
    )


def _only_block_size(claimed: int | list[int] | None) -> int | None:
    if not isinstance(claimed, list):
        return claimed
    if len({*claimed}) != 1:
        raise _invalid(f"remote_block_size must be one for all KV-cache groups, got {claimed}")
    return claimed[0]


def prompt_digest(token_ids: Sequence[int], cache_salt: str = "") -> str:
    """A hash that identifies a prompt, independent of the block size; equal only for equal token
    ids and cache salts."""
    key = blake2b(cache_salt.encode()).digest() if cache_salt else b""
    ids = np.asarray(token_ids, dtype="<u4").tobytes()
    return blake2b(ids, digest_size=16, key=key).hexdigest()


def _check_digest(claimed: str, found: str, num_prompt_tokens: int) -> None:
    """Refuse a request whose peer was given another prompt of the same length: its KV must not be
    used."""
    if claimed != found:
        raise _invalid(
            f"the peer was given another prompt of {num_prompt_tokens} tokens (digest {claimed}, "
            f"here {found}) or cache_salt; send both instances the same request"
        )


def _invalid(problem: str) -> InvalidKVParams:
    return InvalidKVParams(f"kv_transfer_params: {problem}")


@dataclass(frozen=True, slots=True)
class InstanceAddress:
    """The fields that are the same in all parameters that an instance builds."""

    engine_id: str
    host: str
    port: int
    tp_size: int
    block_size: int
    lease_s: float
    num_groups: int = 1

    def tables(self, block_ids: Sequence[int]) -> list[list[int]]:
        """A prompt's block table in the form of the parameters: one list per KV-cache group."""
        return [list(block_ids[group :: self.num_groups]) for group in range(self.num_groups)]


def build_params(
    holder: InstanceAddress,
    request_id: str,
    block_ids: Sequence[int],
    prompt: Sequence[int],
    first: FirstToken,
    cache_salt: str = "",
) -> KVTransferDict:
    """Build the parameters with which a decode instance fetches a prompt's KV; the proxy passes
    them on.

    Args:
        holder: this prefill instance.
        request_id: its name for the lease.
        block_ids: the prompt's block table.
        prompt: token ids of the prompt.
        first: the token that was sampled here.
        cache_salt: the request's cache salt; a part of the prompt's digest.
    """
    params: KVTransferDict = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": holder.engine_id,
        "remote_request_id": request_id,
        "remote_host": holder.host,
        "remote_port": holder.port,
        "remote_block_ids": holder.tables(block_ids),
        "remote_block_size": holder.block_size,
        "remote_ptp_size": holder.tp_size,
        "remote_pcp_size": 1,
        "remote_dcp_size": 1,
        "remote_multi_nodes_meta_mapping": {},
        "num_prompt_blocks": len(block_ids) // holder.num_groups,
        "num_prompt_tokens": len(prompt),
        "prompt_digest": prompt_digest(prompt, cache_salt),
        "lease_seconds": holder.lease_s,
        "last_token_id": first.token_id,
        "remote_cached_tokens": first.num_cached_tokens,
    }
    if first.logprobs is not None:
        logprob, top = first.logprobs
        params["last_token_logprobs"] = [logprob, [list(pair) for pair in top]]
    return params


def build_reservation_params(
    holder: InstanceAddress,
    request_id: str,
    block_ids: Sequence[int],
    prompt: Sequence[int],
    start: int,
    *,
    cache_salt: str = "",
    tokenizer: str = "",
) -> KVTransferDict:
    """Build the parameters with which a prefill instance pushes a prompt's KV, or lets it be pulled
    early; the metaserver passes them on.

    Args:
        holder: the decode instance, which has reserved the blocks.
        request_id: its name for the request.
        block_ids: the reserved blocks.
        prompt: token ids of the prompt.
        start: the first token whose KV is missing.
        cache_salt: the request's cache salt; a part of the prompt's digest.
        tokenizer: fingerprint of the tokenizer that made the prompt from text; empty if the client
            sent token ids.
    """
    tokenized = {"prompt_token_ids": list(prompt), "tokenizer_fingerprint": tokenizer}
    return {
        **(tokenized if tokenizer else {}),
        "token_ids": [],
        "do_remote_prefill": False,
        "do_remote_decode": True,
        "request_id": request_id,
        "remote_request_id": request_id,
        "remote_engine_id": holder.engine_id,
        "remote_host": holder.host,
        "remote_port": holder.port,
        "remote_block_ids": holder.tables(block_ids),
        "remote_block_size": [holder.block_size] * holder.num_groups,
        "remote_tp_size": holder.tp_size,
        "remote_pcp_size": 1,
        "remote_dcp_size": 1,
        "remote_cached_tokens": start,
        "num_prompt_tokens": len(prompt),
        "prompt_digest": prompt_digest(prompt, cache_salt),
        "lease_seconds": holder.lease_s,
    }
