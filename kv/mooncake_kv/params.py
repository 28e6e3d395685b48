"""Parses and builds ``kv_transfer_params``, once, where a request enters.

Names as in vLLM and vLLM-Ascend's MooncakeConnectorV1, so that their proxies can stand in front
of our instances. ``last_token_id`` is the token that the prefill instance sampled.
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
"""``kv_transfer_params`` as JSON has them, to or from a proxy."""


class FirstTokenLogprobs(NamedTuple):
    """Log probabilities of a first token (natural log).

    Args:
        logprob: of the token itself.
        top: the most probable tokens and theirs, best first.
    """

    logprob: float
    top: tuple[tuple[_Count, float], ...]


class FirstToken(msgspec.Struct, frozen=True):
    """The token that a prefill instance sampled, with which a decode instance begins.

    Args:
        token_id: which.
        logprobs: if the request asked for them.
        num_cached_tokens: prompt tokens that needed no computing.
    """

    token_id: int
    logprobs: FirstTokenLogprobs | None = None
    num_cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class RemoteKV:
    """Where the KV of a prompt lies.

    Args:
        engine_id: the holder; another epoch of it has another id.
        request_id: the holder's name for the lease.
        host, port: its side channel.
        block_ids: its block table.
        num_tokens: prompt tokens whose KV is there.
        claimed_tp_size, claimed_block_size, claimed_num_groups: what the request says of the
            holder, if it does; of each KV-cache group the table has an entry in turn.
        lease_s: how long the holder waits for a keepalive, if the request says so.
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
    """Which way an instance's KV moves."""

    NONE = "none"
    PULL = "pull"
    """The decode instance reads: after the prefill, or chunk by chunk while it runs."""
    PUSH = "push"
    """The prefill instance writes, while it computes."""


@dataclass(frozen=True, slots=True)
class PushTarget:
    """Where a prompt's KV is to go.

    Args:
        remote: the blocks, and who reserved them under which name.
        start: the first token whose KV is not there yet.
        prompt_digest: of the prompt that this instance was given.
    """

    remote: RemoteKV
    start: int
    prompt_digest: str = ""


@dataclass(frozen=True, slots=True)
class PrefixSource:
    """A node store that is said to have the KV of a prompt's beginning. A hint: where it turns out
    to be wrong, or takes too long, the prompt is computed.

    Args:
        host, port: where the store listens.
        epoch: of the store when that was said; restarted, it has another one.
        num_tokens: leading tokens whose KV it has.
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
    """What a request's parameters ask this instance to do.

    Args:
        keeps_kv: end after the first token, and keep the KV for a peer.
        remote: load the KV from there.
        first_token: the holder's token, to continue from; None where it is sampled anew here.
        target: write the KV there, or let it be read from there.
        metaserver: reserve blocks, say so there, and wait for the KV and the first token.
        is_pulled: who has reserved blocks reads the KV into them as it is computed; else it is
            written there.
        requester: the address that the request came from; None for one of this process.
        is_verified: whether the holder says which prompt it was given, so that its KV is certainly
            that of this one.
        prefix_sources: where this instance's KVCache pool may find what it is to compute.
        tokenizer: the fingerprint of what made the prompt from a text, for the metaserver; empty
            if the client sent ids.
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
        """What an instance must be able to do to serve this."""
        if self.target is not None or self.metaserver is not None:
            return TransferMode.PULL if self.is_pulled else TransferMode.PUSH
        return TransferMode.PULL if self.keeps_kv or self.remote is not None else TransferMode.NONE


NO_KV_TRANSFER = KVTransferParams()
"""Of a request that one instance serves alone."""


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
    """Read a request's parameters: once, where it enters; they travel as their type from there.

    Args:
        params: as they came; None asks for nothing.
        prompt_token_ids: of the request that carries them. The peer must have been given the same:
            as many, and equal ones where it says by ``prompt_digest`` what it was given.
        cache_salt: of the request; the peer's must be the same.

    Raises:
        InvalidKVParams: a field is missing or of the wrong kind, or they contradict the prompt.
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
        if target is not None:
            target = replace(target, prompt_digest=prompt_digest(prompt_token_ids, cache_salt))
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
    _check_digest(wire.prompt_digest, prompt_token_ids, cache_salt)
    return found


def parse_remote_address(params: KVTransferDict) -> RemoteKV | None:
    """Who holds KV for a request that does not run here after all, so that it can be told.

    Whatever else is wrong with the parameters does not matter; None if they name nobody.
    """
    try:
        wire = msgspec.convert(params, _Wire, strict=True)
        if not wire.do_remote_prefill:
            return None
        _check_address(wire, ADDRESS_FIELDS, "do_remote_prefill", "name the holder")
        return _remote(wire, num_tokens=0)
    except (msgspec.ValidationError, InvalidKVParams):
        return None


def _parse_target(wire: _Wire, num_prompt_tokens: int) -> PushTarget | None:
    """Where a prefill is to write; None if it is to be fetched."""
    if wire.remote_engine_id is None:
        return None
    _check_address(
        wire,
        ADDRESS_FIELDS,
        "do_remote_decode",
        "pass on what the decode instance told the metaserver",
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
    """Whether a name server can be asked for it: what can't be encoded for one can't."""
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
        wire, REMOTE_PREFILL_FIELDS, "do_remote_prefill", "pass on what the prefill answered"
    )
    _check_num_tokens(wire, num_prompt_tokens, "prefill")
    assert wire.last_token_id is not None
    first = FirstToken(wire.last_token_id, wire.last_token_logprobs, wire.remote_cached_tokens)
    remote = _remote(wire, num_prompt_tokens)
    is_verified = wire.prompt_digest is not None
    return KVTransferParams(remote=remote, first_token=first, is_verified=is_verified)


def _remote(wire: _Wire, num_tokens: int) -> RemoteKV:
    values: dict[str, Any] = {name: getattr(wire, f"remote_{name}") for name in _REMOTE_FIELDS}
    assert wire.remote_block_ids is not None
    return RemoteKV(
        **values,
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


_REMOTE_FIELDS = ("engine_id", "request_id", "host", "port")


def prompt_digest(token_ids: Sequence[int], cache_salt: str = "") -> str:
    """A name for a prompt, the same whatever the block size; equal only for equal token ids and
    salts."""
    key = blake2b(cache_salt.encode()).digest() if cache_salt else b""
    ids = np.asarray(token_ids, dtype="<u4").tobytes()
    return blake2b(ids, digest_size=16, key=key).hexdigest()


def _check_digest(claimed: str | None, token_ids: Sequence[int], cache_salt: str) -> None:
    """Refuse a prompt that is as long as the peer's and another one: its KV is not ours. A peer
    that does not say what it was given is believed."""
    if claimed is not None and claimed != (found := prompt_digest(token_ids, cache_salt)):
        raise _invalid(
            f"the peer was given another prompt of {len(token_ids)} tokens (digest {claimed}, here "
            f"{found}) or cache_salt; send both instances the same request"
        )


def _invalid(problem: str) -> InvalidKVParams:
    return InvalidKVParams(f"kv_transfer_params: {problem}")


@dataclass(frozen=True, slots=True)
class InstanceAddress:
    """What stays the same in all that an instance offers."""

    engine_id: str
    host: str
    port: int
    tp_size: int
    block_size: int
    lease_s: float
    num_groups: int = 1

    def tables(self, block_ids: Sequence[int]) -> list[list[int]]:
        """A prompt's block table as parameters have it: one for each KV-cache group."""
        return [list(block_ids[group :: self.num_groups]) for group in range(self.num_groups)]


def build_params(
    holder: InstanceAddress,
    request_id: str,
    block_ids: Sequence[int],
    prompt: Sequence[int],
    first: FirstToken,
) -> KVTransferDict:
    """What the decode instance needs to fetch this KV; the proxy carries it there.

    Args:
        holder: this prefill instance.
        request_id: its name for the lease.
        block_ids: the prompt's table.
        prompt: token ids.
        first: the token sampled here.
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
        "prompt_digest": prompt_digest(prompt),
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
    """What the prefill instance needs to write this KV, or to let it be read; the metaserver
    carries it there.

    Args:
        holder: the decode instance.
        request_id: its name for the request.
        block_ids: what it reserved.
        prompt: token ids.
        start: the first token whose KV it lacks.
        cache_salt: of the request; a part of the prompt's digest.
        tokenizer: fingerprint of what made the prompt from a text; empty if nothing did.
    """
    made = {"prompt_token_ids": list(prompt), "tokenizer_fingerprint": tokenizer}
    return {
        **(made if tokenizer else {}),
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
