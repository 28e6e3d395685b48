"""Selects, per op and shape, an attention library to call instead of our own kernel."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import groupby
from typing import cast

import torch
from torch import Tensor
from torch.backends.cuda import cudnn_sdp_enabled, enable_cudnn_sdp
from torch.nn.functional import scaled_dot_product_attention

from mooncake_hal.errors import CapabilityError
from mooncake_hal_cuda.attention_launch import AttentionCall, attend_grouped
from mooncake_hal_cuda.launch_tuning import Tuning

logger = logging.getLogger(__name__)

AUTO = "auto"
OURS = "triton"
NAMES = (AUTO, OURS, "sdpa", "varlen", "flashinfer")
MARGIN = 0.9
"""A library is chosen only if it takes less than this fraction of our kernel's time: with a smaller
difference, noise would decide, and two instances might choose differently."""

_WORKSPACE_BYTES = 128 << 20
_TRIAL_TOKENS = 2048
_TRIAL_BLOCKS = 16
_TRIAL_SEQUENCES = 16
_LONG_TOKENS = 1024
_TOLERANCE, _RELATIVE_TOLERANCE = 2e-2, 2e-2
"""About two units in the last place of bfloat16: above 4, one unit exceeds the absolute
tolerance."""
_WARM_UPS, _RUNS = 2, 5
_SHORTER_TOKENS = 33
"""Difference in tokens between the lengths of successive timed calls: odd, so that the lengths are
as irregular as those of prompts."""

Attend = Callable[[AttentionCall], Tensor]


@dataclass(frozen=True, slots=True)
class LibraryTrial:
    """The result of trying a candidate.

    Args:
        name: name of the candidate, one of ``NAMES``.
        milliseconds: duration of one call, or None if the candidate can't be used.
        refusal: why it can't be used, or empty.
    """

    name: str
    milliseconds: float | None
    refusal: str = ""


@dataclass(frozen=True, slots=True)
class LibraryChoice:
    """The name of the chosen implementation, and the reason."""

    name: str
    reason: str


def choose_library(wanted: str, trials: Sequence[LibraryTrial]) -> LibraryChoice:
    """Choose the requested candidate, or with AUTO the fastest: our kernel unless a library is
    clearly faster.

    Args:
        wanted: the name of a trial, or AUTO.
        trials: results of all candidates, including our kernel.

    Raises:
        CapabilityError: the requested candidate can't be used; the message says why.
    """
    by_name = {trial.name: trial for trial in trials}
    if wanted != AUTO:
        trial = by_name[wanted]
        if trial.milliseconds is None:
            raise CapabilityError(
                f"MOONCAKE_HAL_CUDA_ATTENTION={wanted} requests this library, but "
                f"{trial.refusal}; use 'auto'"
            )
        return LibraryChoice(wanted, f"MOONCAKE_HAL_CUDA_ATTENTION={wanted} requests it")
    timed = {t.name: t.milliseconds for t in trials if t.milliseconds is not None}
    best = min(timed, key=lambda name: timed[name] * (MARGIN if name == OURS else 1.0))
    return LibraryChoice(best, "; ".join(_describe(trial) for trial in trials))


def _describe(trial: LibraryTrial) -> str:
    if trial.milliseconds is None:
        return f"{trial.name}: {trial.refusal}"
    return f"{trial.name}: {trial.milliseconds:.3f} ms"


class LibraryChooser:
    """Chooses an implementation for each op and shape once, and caches the choice.

    Args:
        wanted: one of NAMES.
    """

    def __init__(self, wanted: str) -> None:
        self.wanted = wanted
        self._chosen: dict[object, str] = {}

    def pick(
        self, op: str, shape: object, tries: Callable[[], Sequence[LibraryTrial]] | None
    ) -> str:
        """Return the chosen name; the first call for a shape runs the trials and logs the choice.

        Args:
            op: name of the op.
            shape: everything that the speed depends on.
            tries: runs the trials. None during a graph capture: our kernel is then returned, and
                the choice is left to a later call.
        """
        key = (op, shape)
        if key in self._chosen:
            return self._chosen[key]
        if tries is None:
            return OURS
        choice = choose_library(self.wanted, tries())
        logger.info("%s of %s runs on %s: %s", op, shape, choice.name, choice.reason)
        self._chosen[key] = choice.name
        return choice.name


def by_sdpa(call: AttentionCall) -> Tensor:
    """Torch's attention over gathered KV, which uses FlashAttention where it can."""
    with _without_cudnn():
        return _attend_each(call)


@contextmanager
def _without_cudnn() -> Iterator[None]:
    """Exclude cuDNN from torch's choice of attention libraries.

    On sm_90, newer versions of torch prefer cuDNN. It builds a plan per length and thread, which
    takes some 0.4 s for a new length, while the device idles. The setting is global to the process.
    Changing it takes two calls and 1 us; ``sdpa_kernel``, which sets all libraries, takes 18 us.
    """
    was_enabled = cudnn_sdp_enabled()  # type: ignore[no-untyped-call]  # torch
    enable_cudnn_sdp(False)
    try:
        yield
    finally:
        enable_cudnn_sdp(was_enabled)


def _attend_each(call: AttentionCall) -> Tensor:
    from torch.nn.attention.bias import causal_lower_right

    batch, out, start = call.batch, torch.empty_like(call.query), 0
    for sequence in range(call.first, call.first + call.sequences):
        stop = start + batch.host_query_lens[sequence]
        context = batch.host_context_lens[sequence]
        blocks = batch.block_tables[sequence, : -(-context // batch.block_size)]
        key, value = (
            cache.index_select(0, blocks).flatten(0, 1)[:context].transpose(0, 1).unsqueeze(0)
            for cache in call.caches
        )
        query = call.query[start:stop].transpose(0, 1).unsqueeze(0)
        attended = scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=causal_lower_right(stop - start, context),
            scale=call.scale,
            enable_gqa=True,
        )
        out[start:stop] = attended[0].transpose(0, 1)
        start = stop
    return out


def by_varlen(call: AttentionCall) -> Tensor:
    """Torch's paged FlashAttention, with one split, so that a sequence's result does not depend on
    the rest of its batch."""
    from torch.nn.attention.varlen import varlen_attn

    batch, first, last = call.batch, call.first, call.first + call.sequences
    starts = batch.query_start[first : last + 1]
    attended = varlen_attn(
        call.query,
        *call.caches,
        starts - starts[0],
        None,
        call.new_tokens,
        call.capacity,
        scale=call.scale,
        window_size=(-1, 0),
        enable_gqa=True,
        seqused_k=batch.context_lens[first:last],
        block_table=batch.block_tables[first:last],
        num_splits=1,
    )
    return cast(Tensor, attended)  # a pair only if asked for


def by_flashinfer(call: AttentionCall) -> Tensor:
    """FlashInfer's decode attention over paged KV, by the function that needs no plan on the
    host."""
    from flashinfer.decode import trtllm_batch_decode_with_kv_cache

    key, value = call.caches
    attended: Tensor = trtllm_batch_decode_with_kv_cache(
        call.query,
        (key, value),
        _workspace(call.query.device),
        call.batch.block_tables[: call.sequences],
        call.batch.context_lens[: call.sequences],
        call.capacity,
        bmm1_scale=call.scale,
        bmm2_scale=1.0,
        kv_layout="NHD",
    )
    return attended


@cache
def _workspace(device: torch.device) -> Tensor:
    return torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)


PREFILL = {"sdpa": by_sdpa, "varlen": by_varlen}
DECODE = {"flashinfer": by_flashinfer}
"""Never chosen by ``auto``: a sequence's result depends on the other sequences of its batch."""


class GroupedAttention:
    """Grouped-head attention by the implementation that was chosen for its shape.

    Args:
        tuning: launch parameters of the device.
        chooser: chooses an implementation per shape, and caches the choices.
    """

    def __init__(self, tuning: Tuning, chooser: LibraryChooser) -> None:
        self._tuning = tuning
        self._chooser = chooser
        wanted = chooser.wanted
        self._prefill = {n: by for n, by in PREFILL.items() if wanted in (AUTO, n)}
        self._decode = {n: by for n, by in DECODE.items() if wanted == n}

    def __call__(self, call: AttentionCall) -> Tensor:
        """Compute attention; returns [tokens, heads, value dim]."""
        libraries = self._decode if call.is_decode else self._prefill
        name = OURS
        if libraries and _is_plain(call):
            tries = None
            if not torch.cuda.is_current_stream_capturing():
                tries = partial(self._tries, call, libraries)
            op = "decode" if call.is_decode else "prefill"
            key = call.caches[0]
            shape = (str(key.dtype), call.query.shape[1], *key.shape[1:], key.stride())
            name = self._chooser.pick(op, shape, tries)
        if name == OURS:
            return attend_grouped(call, self._tuning)
        if self._chooser.wanted == name:
            return libraries[name](call)
        parts = [
            libraries[name](part) if is_long else attend_grouped(part, self._tuning)
            for part, is_long in split_prompts(call, _LONG_TOKENS)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _tries(
        self, call: AttentionCall, libraries: Mapping[str, Attend]
    ) -> Sequence[LibraryTrial]:
        trial = trial_call(call)
        expected = attend_grouped(trial, self._tuning)
        ours = LibraryTrial(
            OURS, mean_milliseconds(partial(attend_grouped, tuning=self._tuning), trial)
        )
        return [ours] + [try_library(name, by, trial, expected) for name, by in libraries.items()]


def split_prompts(call: AttentionCall, least_tokens: int) -> Iterator[tuple[AttentionCall, bool]]:
    """Divide a prefill call into runs of consecutive sequences that are computed alike.

    The trials time one long prompt without a cached prefix. A library that is faster there may be
    slower for short prompts and for chunks, for which it needs a launch per sequence or another
    kernel. The rule depends on a sequence's own lengths only, so that its result does not depend on
    the rest of its batch.

    Args:
        call: a call for prompts.
        least_tokens: length from which on a prompt is long.

    Yields:
        (part of the call, whether its sequences are long prompts without a cached prefix).
    """
    new = call.batch.host_query_lens[call.first : call.first + call.sequences]
    contexts = call.batch.host_context_lens[call.first : call.first + call.sequences]
    is_long = [
        tokens == context >= least_tokens for tokens, context in zip(new, contexts, strict=True)
    ]
    first, start = 0, 0
    for answer, run in groupby(is_long):
        stop = first + len(list(run))
        tokens = sum(new[first:stop])
        yield (
            replace(
                call,
                query=call.query[start : start + tokens],
                first=call.first + first,
                new_tokens=max(new[first:stop]),
                sequences=stop - first,
            ),
            answer,
        )
        first, start = stop, start + tokens


def _is_plain(call: AttentionCall) -> bool:
    """Whether libraries support the call: on a GPU, in 16 bits, with KV of the queries' type."""
    query, (key, value) = call.query, call.caches
    is_plain = key.dtype == query.dtype != torch.float32 and key.shape == value.shape
    return query.device.type == "cuda" and is_plain and len(query) > 0


def trial_call(call: AttentionCall) -> AttentionCall:
    """Make a call with the same head shapes and strides, and as many tokens as a busy step has.

    Its block tables repeat a few blocks of random numbers, to save memory.
    """
    device, dtype = call.query.device, call.query.dtype
    num_blocks, block_size = min(_TRIAL_BLOCKS, len(call.caches[0])), call.batch.block_size
    new, sequences = (1, _TRIAL_SEQUENCES) if call.is_decode else (_TRIAL_TOKENS, 1)
    width = -(-_TRIAL_TOKENS // block_size)
    key, value = (
        torch.empty_strided(
            (num_blocks, *cache.shape[1:]), cache.stride(), dtype=dtype, device=device
        )
        for cache in call.caches
    )
    counted = partial(torch.arange, dtype=torch.int32, device=device)
    batch = replace(
        call.batch,
        num_decodes=sequences if call.is_decode else 0,
        query_start=counted(sequences + 1) * new,
        context_lens=counted(sequences) * 0 + _TRIAL_TOKENS,
        block_tables=(counted(width) % num_blocks).repeat(sequences, 1),
        host_query_lens=(new,) * sequences,
        host_context_lens=(_TRIAL_TOKENS,) * sequences,
    )
    query = torch.randn(sequences * new, *call.query.shape[1:], dtype=dtype, device=device)
    caches = (key.normal_(), value.normal_())
    trial = replace(call, query=query, caches=caches, batch=batch)
    return replace(trial, first=0, new_tokens=new, sequences=sequences)


def shortened(trial: AttentionCall, tokens: int) -> AttentionCall:
    """Copy a trial call, with contexts (and for prefill also prompts) shorter by ``tokens``."""
    batch, sequences = trial.batch, trial.sequences
    new = 1 if trial.is_decode else trial.new_tokens - tokens
    shorter = replace(
        batch,
        query_start=torch.arange(sequences + 1, dtype=torch.int32, device=trial.query.device) * new,
        context_lens=batch.context_lens - tokens,
        host_query_lens=(new,) * sequences,
        host_context_lens=tuple(context - tokens for context in batch.host_context_lens),
    )
    return replace(trial, query=trial.query[: sequences * new], batch=shorter, new_tokens=new)


def try_library(name: str, by: Attend, trial: AttentionCall, expected: Tensor) -> LibraryTrial:
    """Run a library on a call whose result is known; an error that it raises is its refusal."""
    try:
        found = by(trial)
        torch.cuda.synchronize()
    except (ImportError, RuntimeError, ValueError, TypeError, AssertionError) as exc:
        return LibraryTrial(name, None, f"it can't be used here: {exc}")
    off = (found.float() - expected.float()).abs()
    allowed = _TOLERANCE + _RELATIVE_TOLERANCE * expected.float().abs()
    if not bool((off <= allowed).all()):
        return LibraryTrial(name, None, f"its result is off by {float(off.max()):.3g}")
    return LibraryTrial(name, mean_milliseconds(by, trial))


def mean_milliseconds(by: Attend, trial: AttentionCall) -> float:
    """The mean duration of a call, over calls whose lengths were not seen before.

    Prompt lengths rarely repeat: whatever a library prepares per length, it would prepare in nearly
    every step.
    """
    for _ in range(_WARM_UPS):
        by(trial)
    calls = [shortened(trial, _SHORTER_TOKENS * (run + 1)) for run in range(_RUNS)]
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]  # torch
    begin.record()
    for call in calls:
        by(call)
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / _RUNS
