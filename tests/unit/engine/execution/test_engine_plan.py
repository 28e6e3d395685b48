"""The engine plan: what a config requests against what model and backend support."""

from __future__ import annotations

import json
import logging
import pickle
import re
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support.checkpoints import random_model, write_checkpoint
from support.fp8_checkpoints import FORMS, edit_config

from mooncake_engine.assembly import pool_identity, rounding_of
from mooncake_engine.checkpoints.gguf_index import GGUF_INDEX_NAME
from mooncake_engine.config import EngineConfig, Role
from mooncake_engine.errors import CheckpointError, ConfigError
from mooncake_engine.execution.engine_plan import choose_swap_space, make_plan, rank_device
from mooncake_engine.execution.memory_profiling import profiling_kv_cache_size
from mooncake_engine.models.quantization_config import FP8_ON_LOAD
from mooncake_engine.models.rope import LongRopeScaling
from mooncake_engine.speculative_config import SpeculativeConfig, SpeculativeMethod
from mooncake_hal.backend import Backend, DeviceInfo
from mooncake_hal.registry import Registry
from mooncake_kv.config import KVTransferConfig
from mooncake_kv.numerics import differences
from mooncake_kv.pool.pool_config import read_kv_pool


@pytest.fixture(scope="module")
def backend() -> Backend:
    return Registry.discover().select_backend("cpu")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    fields = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 101,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "dtype": "float16",
    }
    (tmp_path / "config.json").write_text(json.dumps(fields))
    return tmp_path


def test_defaults_follow_from_model_and_backend(
    model: Path, backend: Backend, caplog: pytest.LogCaptureFixture
) -> None:
    config = EngineConfig(model, num_kv_blocks=10)
    with caplog.at_level(logging.WARNING):
        setup = make_plan(config, backend)
    assert setup.dtype is getattr(torch, backend.capabilities.dtypes[0])
    assert "checkpoint is float16, which the backend does not support" in caplog.text
    assert setup.max_model_len == 160
    assert setup.layout_name == backend.capabilities.kv_layouts[0]
    assert setup.max_blocks == 10
    assert setup.kv_cache_size.num_host_blocks == 10


@pytest.mark.parametrize(
    ("device", "stored", "asked", "served"),
    [
        ("cpu", "float32", "auto", "float32"),
        ("meta", "float32", "auto", "bfloat16"),
        ("meta", "float32", "float32", "float32"),
        ("meta", "bfloat16", "auto", "bfloat16"),
        ("meta", "float16", "auto", "float16"),
    ],
)
def test_float32_checkpoint_is_served_in_16_bits_on_a_device(
    model: Path,
    backend: Backend,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    device: str,
    stored: str,
    asked: str,
    served: str,
) -> None:
    """As with vLLM's ``--dtype auto``: its users have sized their devices for 16 bits."""
    edit_config(model, lambda config: config.update(dtype=stored))
    all_types = replace(backend.capabilities, dtypes=("bfloat16", "float16", "float32"))
    monkeypatch.setattr(backend, "capabilities", all_types)
    monkeypatch.setattr(backend.runtime, "device", lambda _index: torch.device(device))
    plan = make_plan(EngineConfig(model, num_kv_blocks=10, dtype=asked), backend)
    assert str(plan.dtype) == f"torch.{served}"
    is_narrowed = "checkpoint is float32: running in bfloat16, as vLLM does" in caplog.text
    assert is_narrowed == (served != stored)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"block_size": 5}, "block_size 5 was requested"),
    ({"kv_cache_dtype": "fp4"}, r"must be one of \['auto', 'fp8', 'fp8_e4m3'\], got 'fp4'"),
    ({"quantization": "awq"}, r"quantization must be one of \[None, 'fp8'\], got 'awq'"),
    ({"quantization": "fp8"}, "'fp8' was requested, backend 'cpu' does not support linear layers"),
    ({"dtype": "float8"}, "dtype 'float8' was requested, the backend supports"),
    ({"max_model_len": 257}, "the model supports 256 tokens; lower it"),
    ({"max_model_len": 161}, "the pool holds 160 tokens; lower it"),
    ({"max_model_len": 0}, "max_model_len must be at least 1, got 0"),
    ({"kv_layout": "XYZ"}, "KV layout 'XYZ' was"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED, ids=lambda value: str(value)[:30])
def test_unsupported_requests_are_rejected(
    options: dict[str, Any], message: str, model: Path, backend: Backend
) -> None:
    with pytest.raises(ConfigError, match=message):
        make_plan(EngineConfig(model, num_kv_blocks=10, **options), backend)


class OfOneSize:
    """The CPU backend with a single block size, like Ascend."""

    name = "strict"

    def __init__(self, inner: Backend) -> None:
        self.runtime = inner.runtime
        self.capabilities = replace(inner.capabilities, block_sizes=(128,))


def test_the_backend_chooses_the_default_block_size(model: Path, backend: Backend) -> None:
    strict: Any = OfOneSize(backend)
    config = EngineConfig(model, num_kv_blocks=2)
    assert make_plan(config, backend).kv_cache_size.block_size == 16
    assert make_plan(config, strict).kv_cache_size.block_size == 128
    assert make_plan(replace(config, block_size=32), backend).kv_cache_size.block_size == 32
    with pytest.raises(
        ConfigError, match=r"block_size 16 was requested, backend 'strict' supports \[128"
    ):
        make_plan(replace(config, block_size=16), strict)


def test_a_head_size_that_the_backend_lacks_is_refused(model: Path, backend: Backend) -> None:
    strict: Any = OfOneSize(backend)
    config = EngineConfig(model, num_kv_blocks=2)
    size = make_plan(config, backend).geometry.plane_dims[0]
    strict.capabilities = replace(strict.capabilities, head_dims=(size, 256))
    assert make_plan(config, strict).geometry.plane_dims[0] == size
    strict.capabilities = replace(strict.capabilities, head_dims=(256,))
    with pytest.raises(ConfigError, match=rf"of {size} elements, backend 'strict' supports \[256"):
        make_plan(config, strict)


@pytest.mark.parametrize(
    ("device", "options", "overlaps"),
    [
        ("cpu", {}, False),
        ("meta", {}, True),
        ("meta", {"async_scheduling": False}, False),
        ("cpu", {"async_scheduling": True}, True),
        ("meta", {"speculative_config": SpeculativeConfig(SpeculativeMethod.NGRAM)}, True),
        ("meta", {"pp_size": 2}, False),
    ],
)
def test_async_scheduling_is_the_default_on_a_device(
    model: Path,
    backend: Backend,
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    options: dict[str, Any],
    overlaps: bool,
) -> None:
    monkeypatch.setattr(backend.runtime, "device", lambda _index: torch.device(device))
    plan = make_plan(EngineConfig(model, num_kv_blocks=10, **options), backend)
    assert plan.config.uses_async_scheduling is overlaps


def test_ranks_get_devices_in_order_or_share_the_only_one() -> None:
    several = [DeviceInfo(index, "x", "g", 1) for index in range(4)]
    config = EngineConfig(Path("m"), device=1, tp_size=4)
    assert [rank_device(config, several, rank) for rank in range(3)] == [1, 2, 3]
    with pytest.raises(ConfigError, match=r"rank 3 of 4 needs device 4, found \[0, 1, 2, 3\]"):
        rank_device(config, several, 3)
    assert rank_device(EngineConfig(Path("m"), tp_size=2), several[:1], 1) == 0


def test_max_model_len_beyond_the_models_is_rejected_before_profiling(
    model: Path, backend: Backend
) -> None:
    config = EngineConfig(model, memory_utilization=0.5, max_model_len=1 << 20)
    with pytest.raises(ConfigError, match="model supports"):
        make_plan(config, backend)


def test_model_with_a_sliding_window_is_limited_to_it(
    tmp_path: Path, backend: Backend, caplog: pytest.LogCaptureFixture
) -> None:
    """Phi-3-mini-4k and Mistral-7B-v0.1, as vLLM with --disable-sliding-window."""
    model = write_checkpoint(random_model("phi3", sliding_window=64), tmp_path)
    # without swap space, for which a host with little free memory logs a warning
    config = EngineConfig(model, num_kv_blocks=10, swap_space_bytes=0)
    assert make_plan(replace(config, max_model_len=64), backend).max_model_len == 64
    assert not caplog.records
    with pytest.raises(ConfigError, match=r"a sliding window of 64 tokens.*--max-model-len 64 or"):
        make_plan(replace(config, max_model_len=65), backend)
    assert make_plan(config, backend).max_model_len == 64
    assert "limited to the 64 tokens of the model's sliding window" in caplog.text


def test_pool_sized_by_profiling_has_no_size_in_the_plan(model: Path, backend: Backend) -> None:
    config = EngineConfig(model, memory_utilization=0.5, max_num_batched_tokens=64, max_num_seqs=2)
    plan = make_plan(config, backend)
    assert plan.kv_cache_size is None
    assert profiling_kv_cache_size(plan).num_blocks == 3, "32 tokens, and one block more"
    final = plan.with_blocks(9)
    assert final.kv_cache_size is not None
    assert final.kv_cache_size.num_blocks == 9
    assert final.max_model_len == min(9 * 16, plan.max_model_len)


def test_plan_survives_pickling(model: Path, backend: Backend) -> None:
    config = EngineConfig(model, memory_utilization=0.5, tp_size=2)
    plan = make_plan(config, backend)
    assert pickle.loads(pickle.dumps(plan)) == plan
    assert pickle.loads(pickle.dumps(plan.with_blocks(9))) == plan.with_blocks(9)


@pytest.mark.parametrize("share", [0.0, -0.5, 1.5])
def test_memory_utilization_outside_0_to_1_is_rejected(model: Path, share: float) -> None:
    with pytest.raises(ConfigError, match=r"memory_utilization must be in \(0, 1\]"):
        EngineConfig(model, memory_utilization=share)


def test_narrower_kv_dtype_takes_less_memory(model: Path, backend: Backend) -> None:
    save_file(
        {
            f"model.layers.1.self_attn.{kind}_scale": torch.tensor([value])
            for kind, value in (("k", 0.25), ("v", 4.0))
        },
        model / "model.safetensors",
    )
    narrow, wide = (
        make_plan(EngineConfig(model, kv_cache_bytes=1 << 20, kv_cache_dtype=name), backend)
        for name in ("fp8_e4m3", "auto")
    )
    assert (narrow.geometry.dtype, narrow.geometry.element_bytes) == ("float8_e4m3fn", 1)
    assert (
        narrow.kv_cache_size.num_blocks
        == wide.geometry.element_bytes * wide.kv_cache_size.num_blocks
    )
    assert narrow.dtype is wide.dtype
    assert (narrow.kv_scales, wide.kv_scales) == (((1.0, 1.0), (0.25, 4.0)), ())


@pytest.mark.parametrize("value", [[0.0], [float("nan")], [1.0, 2.0]])
def test_invalid_kv_scale_is_rejected(model: Path, backend: Backend, value: list[float]) -> None:
    save_file(
        {"model.layers.0.self_attn.k_scale": torch.tensor(value)}, model / "model.safetensors"
    )
    with pytest.raises(CheckpointError, match=r"self_attn\.k_scale must be one positive number"):
        make_plan(EngineConfig(model, num_kv_blocks=10, kv_cache_dtype="fp8"), backend)


def test_unsupported_kv_dtype_is_rejected(model: Path) -> None:
    null = Registry.discover().select_backend("null")
    with pytest.raises(ConfigError, match="is float8_e4m3fn; backend 'null' supports the model's"):
        make_plan(EngineConfig(model, num_kv_blocks=10, kv_cache_dtype="fp8"), null)


@pytest.mark.parametrize(
    ("multiplied", "form", "warned"),
    [
        ((), "blocks", "backend 'cpu' does not support fp8 on this device"),
        (("fp8",), "blocks", "experts .* backend 'cpu' supports only linear layers in fp8"),
        (("fp8", "fp8_experts"), "static", "experts .* are supported only for linear layers"),
        (("fp8", "fp8_experts"), "blocks", None),
        (("fp8", "fp8_experts"), "channel", None),
    ],
)
def test_experts_stay_in_fp8_if_the_backend_multiplies_fp8(
    tmp_path: Path,
    backend: Backend,
    caplog: pytest.LogCaptureFixture,
    multiplied: tuple[str, ...],
    form: str,
    warned: str | None,
) -> None:
    """Otherwise the log says why not; the backend's fused ops for experts don't support fp8."""
    model = write_checkpoint(random_model("qwen3_moe"), tmp_path / "model")
    edit_config(model, lambda config: config.update(quantization_config=FORMS[form]))
    able = multiplying(backend, *multiplied)
    plan = make_plan(EngineConfig(model, num_kv_blocks=10, tp_size=2, ep_size=2), able)
    assert plan.keeps_fp8_experts(plan.model) == (warned is None)
    assert (plan.whole_experts is None) == (warned is None)
    warnings = [r.getMessage() for r in caplog.records if "are dequantised" in r.getMessage()]
    assert len(warnings) == (warned is not None)
    assert all(warned is not None and re.search(warned, warning) for warning in warnings)


def multiplying(backend: Backend, *quantization: str) -> Backend:
    """Return the backend with these quantization capabilities."""
    able = copy(backend)
    able.capabilities = replace(backend.capabilities, quantization=quantization)
    return able


def test_draft_model_is_not_quantised_on_load(
    tmp_path: Path, model: Path, backend: Backend, caplog: pytest.LogCaptureFixture
) -> None:
    moe = write_checkpoint(random_model("qwen3_moe", vocab_size=101), tmp_path / "moe")
    drafting = SpeculativeConfig(SpeculativeMethod.DRAFT, model=model)
    config = EngineConfig(
        moe, num_kv_blocks=10, quantization="fp8", speculative_config=drafting, tp_size=2
    )
    plan = make_plan(config, multiplying(backend, "fp8", "fp8_experts"))
    assert plan.model.quantization is FP8_ON_LOAD
    assert plan.keeps_fp8_experts(plan.model)
    assert plan.draft is not None
    assert plan.draft.model.quantization is None
    assert "dequantised" not in caplog.text
    with pytest.raises(ConfigError, match="does not support experts in fp8 on this device: leave"):
        make_plan(config, multiplying(backend, "fp8"))
    with pytest.raises(ConfigError, match="not support linear layers and experts in fp8"):
        make_plan(config, backend)


def test_quantised_weights_are_kept(model: Path, backend: Backend) -> None:
    """fp8 weights on every backend; other quantization methods are rejected by name."""
    config = EngineConfig(model, num_kv_blocks=10, quantization="fp8")
    edit_config(model, lambda fields: fields.update(quantization_config=FORMS["blocks"]))
    for each in (backend, multiplying(backend, "fp8", "fp8_experts")):
        plan = make_plan(config, each)
        assert plan.model == make_plan(replace(config, quantization=None), each).model
    edit_config(model, lambda fields: fields.update(quantization_config={"quant_method": "awq"}))
    with pytest.raises(CheckpointError, match=r"awq.* is not supported"):
        make_plan(config, backend)
    edit_config(model, lambda fields: fields.pop("quantization_config"))
    (model / GGUF_INDEX_NAME).write_text("{}")
    with pytest.raises(ConfigError, match="is GGUF, which has its own quantisation"):
        make_plan(config, multiplying(backend, "fp8", "fp8_experts"))


def test_kv_of_weights_quantised_on_load_has_another_identity(
    tmp_path: Path, backend: Backend
) -> None:
    """Peers see another rounding, and a pool keeps the KV apart."""
    model = write_checkpoint(random_model("qwen3_moe"), tmp_path / "moe")
    able = multiplying(backend, "fp8", "fp8_experts")
    config = EngineConfig(model, num_kv_blocks=10)
    plain, on_load = (make_plan(replace(config, quantization=name), able) for name in (None, "fp8"))
    ours, theirs = (rounding_of(plan, able.capabilities, "v1") for plan in (plain, on_load))
    both = ("on unquantised weights", "in fp8, quantised on load")
    assert differences(ours, theirs) == {"linear layers": both, "experts": both}
    edit_config(model, lambda fields: fields.update(quantization_config=FORMS["channel"]))
    beforehand = make_plan(config, able)
    assert rounding_of(beforehand, able.capabilities, "v1")["experts"] == "in fp8"
    assert (
        rounding_of(make_plan(config, backend), able.capabilities, "v1")["experts"]
        == "on dequantised weights"
    )
    edit_config(model, lambda fields: fields.pop("quantization_config"))
    assert pool_identity(plain, 256) == pool_identity(make_plan(config, able), 256)
    assert pool_identity(plain, 256).root() != pool_identity(on_load, 256).root()


@pytest.mark.parametrize("family", ["llama", "deepseek_v2"])
def test_pool_identity_includes_the_rope_order_of_latents(
    family: str, tmp_path: Path, backend: Backend
) -> None:
    model = write_checkpoint(random_model(family), tmp_path)
    plan = make_plan(EngineConfig(model, num_kv_blocks=10), backend)
    has_order = pool_identity(plan, 256).rope.endswith("halves")
    assert has_order is (family == "deepseek_v2")


def test_longrope_factors_follow_max_model_len_and_are_in_the_identity(
    tmp_path: Path, backend: Backend
) -> None:
    longrope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 4,
        "long_factor": [2.0] * 4,
        "original_max_position_embeddings": 64,
    }
    shape = {"rope_parameters": longrope, "original_max_position_embeddings": 64}
    model = write_checkpoint(random_model("phi3", **shape), tmp_path)
    short, long = (
        make_plan(EngineConfig(model, num_kv_blocks=64, max_model_len=length), backend)
        for length in (64, 65)
    )
    for plan, factors in ((short, [1.0] * 4), (long, [2.0] * 4)):
        assert isinstance(plan.model.rope.scaling, LongRopeScaling)
        assert plan.model.rope.scaling.factors == tuple(factors)
    assert pool_identity(short, 256) != pool_identity(long, 256)
    assert pool_identity(short, 256).root() != pool_identity(long, 256).root()


def test_swap_space_defaults_to_four_gib_or_less_with_a_warning(
    model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    gib = 1 << 30
    assert choose_swap_space(EngineConfig(model), 64 * gib) == 4 * gib
    assert not caplog.records
    assert choose_swap_space(EngineConfig(model, tp_size=8), 64 * gib) == 2 * gib
    [record] = caplog.records
    assert "swap space is 2.0 GiB per rank instead of 4 GiB: a quarter" in record.getMessage()
    assert choose_swap_space(EngineConfig(model, swap_space_bytes=0), 64 * gib) == 0
    assert choose_swap_space(EngineConfig(model, swap_space_bytes=9 * gib), gib) == 9 * gib


@pytest.mark.parametrize(("pool", "is_native"), [(None, True), ("dram=1MiB", False)])
def test_latents_for_a_pool_are_not_in_the_native_layout(
    backend: Backend,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    pool: str | None,
    is_native: bool,
) -> None:
    model = write_checkpoint(random_model("deepseek_v2"), tmp_path)
    capabilities = replace(backend.capabilities, native_latents=True)
    monkeypatch.setattr(backend, "capabilities", capabilities)
    config = EngineConfig(
        model,
        role=Role.DECODE,
        num_kv_blocks=10,
        kv_transfer=KVTransferConfig(),
        kv_pool=None if pool is None else read_kv_pool(pool),
    )
    assert make_plan(config, backend).has_native_latents is is_native
