"""Calls of attention libraries: their results if the CPU supports them, else their signatures."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from inspect import signature

import pytest
import torch
from torch.backends.cuda import cudnn_sdp_enabled

from mooncake_hal.reference import ReferenceOps
from mooncake_hal.registry import Registry
from mooncake_hal.testing.backends_data import Shape, make_case
from mooncake_hal.testing.backends_ops import assert_same

pytest.importorskip("triton", reason="needs triton: ci/install dev installs it on Linux")

from mooncake_hal_cuda.attention_launch import AttentionCall
from mooncake_hal_cuda.attention_libraries import (
    AUTO,
    OURS,
    Attend,
    LibraryTrial,
    by_sdpa,
    by_varlen,
    choose_library,
    mean_milliseconds,
    shortened,
    split_prompts,
    trial_call,
    try_library,
)

MODULE = "mooncake_hal_cuda.attention_libraries"
LENGTHS = ((1, 20), (5, 5), (3, 40), (33, 130), (1, 1))
SCALES = (1.0, 1.0)


@pytest.mark.parametrize("heads", [(8, 2), (14, 2), (4, 4)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sdpa_over_gathered_kv(heads: tuple[int, int], dtype: str) -> None:
    backend = Registry.discover().select_backend("cpu")
    case = make_case(backend, Shape(dtype, heads=heads[0], kv_heads=heads[1]), LENGTHS)
    try:
        query, caches = case.query[case.batch.num_decodes :], (case.kv.key, case.kv.value)
        found = by_sdpa(AttentionCall.of_prompts(query, caches, case.batch, 0.125, SCALES))
        wanted = ReferenceOps().prefill_attention(query, *caches, case.batch, 0.125)
        assert_same(found, wanted, dtype)
        del caches
    finally:
        case.kv.free()


@pytest.mark.parametrize(
    ("least_tokens", "parts"),
    [(1, [(1, False), (1, True), (2, False), (1, True)]), (33, [(5, False)]), (5, [(1, False)])],
)
def test_prompts_are_split_at_long_whole_ones(
    least_tokens: int, parts: list[tuple[int, bool]]
) -> None:
    """The parts together compute the same as the whole call."""
    backend = Registry.discover().select_backend("cpu")
    lengths = ((1, 20), (2, 4), (5, 5), (3, 40), (33, 130), (1, 1))
    case = make_case(backend, Shape("float32"), lengths)
    try:
        query, caches = case.query[case.batch.num_decodes :], (case.kv.key, case.kv.value)
        call = AttentionCall.of_prompts(query, caches, case.batch, 0.125, SCALES)
        cut = list(split_prompts(call, least_tokens))
        assert [(part.sequences, is_long) for part, is_long in cut][: len(parts)] == parts
        assert sum(part.sequences for part, _ in cut) == call.sequences
        wanted = ReferenceOps().prefill_attention(query, *caches, case.batch, 0.125)
        assert_same(torch.cat([by_sdpa(part) for part, _ in cut]), wanted, "float32")
        del caches
    finally:
        case.kv.free()


@pytest.mark.parametrize("is_decode", [True, False])
def test_trial_is_a_large_step_over_caches_of_the_same_strides(is_decode: bool) -> None:
    backend = Registry.discover().select_backend("cpu")
    case = make_case(backend, Shape(layout="BHLPT"), ((1, 20), (7, 7)))
    try:
        of = AttentionCall.of_decodes if is_decode else AttentionCall.of_prompts
        query = case.query[:1] if is_decode else case.query[1:]
        trial = trial_call(of(query, (case.kv.key, case.kv.value), case.batch, 0.125, SCALES))
        assert [c.stride() for c in trial.caches] == [case.kv.key.stride(), case.kv.value.stride()]
        assert trial.batch.host_context_lens == (2048,) * trial.sequences
        assert len(trial.query) == trial.sequences * trial.new_tokens >= 16
        assert int(trial.batch.block_tables.max()) < len(trial.caches[0])
        attend = ReferenceOps().decode_attention if is_decode else ReferenceOps().prefill_attention
        wanted = attend(trial.query, *trial.caches, trial.batch, 0.125)
        assert_same(by_sdpa(trial), wanted, "float32")
    finally:
        case.kv.free()


def test_sdpa_disables_cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    """For chunks and for whole prompts; the caller's setting is restored."""
    enabled: list[bool] = []

    def attend(query: torch.Tensor, *others: object, **options: object) -> torch.Tensor:
        enabled.append(cudnn_sdp_enabled())
        return query

    monkeypatch.setattr(f"{MODULE}.scaled_dot_product_attention", attend)
    backend = Registry.discover().select_backend("cpu")
    case = make_case(backend, Shape("bfloat16"), LENGTHS)
    try:
        query, caches = case.query[case.batch.num_decodes :], (case.kv.key, case.kv.value)
        assert cudnn_sdp_enabled()
        by_sdpa(AttentionCall.of_prompts(query, caches, case.batch, 0.125, SCALES))
        del caches
    finally:
        case.kv.free()
    assert enabled == [False] * (len(LENGTHS) - case.batch.num_decodes)
    assert cudnn_sdp_enabled()


@pytest.fixture
def trial() -> Iterator[AttentionCall]:
    """The trial call of a long prompt."""
    backend = Registry.discover().select_backend("cpu")
    case = make_case(backend, Shape("bfloat16"), ((7, 7),))
    caches = (case.kv.key, case.kv.value)
    yield trial_call(AttentionCall.of_prompts(case.query, caches, case.batch, 0.125, SCALES))
    del caches
    case.kv.free()


def test_shortened_trial_is_a_valid_call(trial: AttentionCall) -> None:
    shorter = shortened(trial, 33)
    assert shorter.batch.host_query_lens == shorter.batch.host_context_lens == (2015,)
    wanted = ReferenceOps().prefill_attention(shorter.query, *shorter.caches, shorter.batch, 0.125)
    assert_same(by_sdpa(shorter), wanted, "bfloat16")


class _Clock:
    """A stand-in for CUDA events; the timed calls advance its clock."""

    now = 0.0

    def __init__(self, **options: bool) -> None:
        self._at = 0.0

    def record(self) -> None:
        self._at = _Clock.now

    def synchronize(self) -> None:
        """Do nothing: all work is synchronous."""

    def elapsed_time(self, end: _Clock) -> float:
        return end._at - self._at


def _taking(each: float, planning_ms: float) -> Attend:
    seen: set[int] = set()

    def attend(call: AttentionCall) -> torch.Tensor:
        tokens = call.new_tokens
        _Clock.now += each if tokens in seen else each + planning_ms
        seen.add(tokens)
        return call.query

    return attend


@pytest.mark.parametrize(("planning_ms", "chosen"), [(0.0, "sdpa"), (400.0, OURS)])
def test_library_that_plans_for_each_length_is_not_chosen(
    trial: AttentionCall, planning_ms: float, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "Event", _Clock)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    ours = LibraryTrial(OURS, mean_milliseconds(_taking(1.0, 0.0), trial))
    other = try_library("sdpa", _taking(0.5, planning_ms), trial, trial.query)
    assert ours.milliseconds == pytest.approx(1.0)
    assert choose_library(AUTO, [ours, other]).name == chosen


def test_varlen_accepts_the_call() -> None:
    """On meta tensors: torch checks names, shapes and types, and computes nothing."""
    varlen = pytest.importorskip("torch.nn.attention.varlen", reason="this torch has none")
    if "block_table" not in signature(varlen.varlen_attn).parameters:
        pytest.skip("varlen_attn of this torch reads no paged KV; the backend says so, too")
    backend = Registry.discover().select_backend("cpu")
    case = make_case(backend, Shape("bfloat16"), LENGTHS)
    try:
        caches = tuple(cache.to("meta") for cache in (case.kv.key, case.kv.value))
        names = ("query_start", "context_lens", "block_tables", "slot_mapping")
        batch = replace(
            case.batch, **{name: getattr(case.batch, name).to("meta") for name in names}
        )
        query = case.query[case.batch.num_decodes :].to("meta")
        call = AttentionCall.of_prompts(query, caches, batch, 0.125, SCALES)
        assert by_varlen(call).shape == query.shape
    finally:
        case.kv.free()
