"""The description of an instance from vLLM's configuration, and unsupported settings."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mooncake_hal.kv.geometry import AttentionKind, KVGroup
from mooncake_hal.latents import PAIRS
from mooncake_kv.model_fingerprint import model_fingerprint
from mooncake_vllm.errors import UnsupportedByVllmConnector
from mooncake_vllm.vllm_instance import (
    check_outer_role,
    check_siblings,
    check_supported,
    describe_device,
    describe_instance,
    fingerprint,
    model_kv,
    rope_order_converter,
    steps_may_wait,
)
from mooncake_vllm.vllm_memory import ModelKV

EXAMPLE = Path(__file__).parents[3] / "examples" / "tiny-llama"


class FullAttentionSpec(SimpleNamespace):
    """A stand-in with vLLM's class name."""


class MLAAttentionSpec(SimpleNamespace):
    """By vLLM's name."""


class SlidingWindowSpec(SimpleNamespace):
    """By vLLM's name."""


class MambaSpec(SimpleNamespace):
    """By vLLM's name."""


def spec(kind: type = FullAttentionSpec, **changes: Any) -> Any:
    plain = {
        "block_size": 16,
        "num_kv_heads": 8,
        "head_size": 64,
        "head_size_v": 64,
        "dtype": torch.bfloat16,
        "tokens_per_state": 1,
        "kv_quant_mode": 0,
        "page_size_padded": None,
        "num_head_slots": None,
        "state_content_bytes": None,
    }
    return kind(**(plain | changes))


SLIDING = spec(SlidingWindowSpec, sliding_window=128)


def groups(*specs: Any) -> list[Any]:
    """Assign layers to KV-cache groups round-robin."""
    return [
        SimpleNamespace(
            kv_cache_spec=each,
            layer_names=[f"model.layers.{n}.attn" for n in range(at, 6, len(specs))],
        )
        for at, each in enumerate(specs)
    ]


def caches(*specs: Any) -> Any:
    return SimpleNamespace(kv_cache_groups=groups(*specs))


def config(**changes: Any) -> Any:
    parallel = {
        "pipeline_parallel_size": 1,
        "tensor_parallel_size": 1,
        "decode_context_parallel_size": 1,
        "prefill_context_parallel_size": 1,
        "nnodes_within_dp": 1,
    }
    transfer = SimpleNamespace(engine_id="name", is_kv_producer=True, is_kv_consumer=False)
    return SimpleNamespace(
        parallel_config=SimpleNamespace(**(parallel | changes)),
        kv_transfer_config=transfer,
        model_config=model(),
        load_config=SimpleNamespace(download_dir=None),
        instance_id="abcde",
    )


def model(**changes: Any) -> Any:
    plain: dict[str, Any] = {
        "model": str(EXAMPLE),
        "revision": None,
        "dtype": torch.float32,
        "quantization": None,
        "hf_overrides": {},
        "hf_config_path": None,
        "max_model_len": 4096,
        "enable_sleep_mode": False,
        "enable_cumem_allocator": False,
        "hf_config": SimpleNamespace(to_json_string=lambda: "{}"),
        "hf_text_config": SimpleNamespace(kv_lora_rank=512, qk_rope_head_dim=64),
        "get_total_num_kv_heads": lambda: 8,
        "get_total_num_hidden_layers": lambda: 32,
    }
    return SimpleNamespace(**(plain | changes))


@pytest.mark.parametrize(
    "specs",
    [
        [spec()],
        [spec(MLAAttentionSpec)],
        [SLIDING],
        [spec(), SLIDING],
        [spec(), SLIDING, SLIDING],
        [spec(sliding_window=128)],
    ],
    ids=str,
)
def test_attention_with_and_without_windows_is_supported(specs: list[Any]) -> None:
    check_supported(config(), caches(*specs))


@pytest.mark.parametrize(
    ("cache", "changes", "words"),
    [
        (caches(spec(), MambaSpec()), {}, "a KV cache of MambaSpec"),
        (caches(spec(head_size=32), SLIDING), {}, "KV-cache groups that differ"),
        (caches(spec(block_size=32), SLIDING), {}, "--disable-hybrid-kv-cache-manager"),
        (caches(spec(), SLIDING), {"pipeline_parallel_size": 2}, "on several pipeline stages"),
        (caches(SLIDING), {"pipeline_parallel_size": 2}, "sliding windows on several pipeline"),
        (caches(spec(kv_quant_mode=1)), {}, "kv_quant_mode is 1"),
        (caches(spec(tokens_per_state=4)), {}, "tokens_per_state is 4"),
        (caches(spec(page_size_padded=4096)), {}, "page_size_padded is 4096"),
        (caches(spec()), {"decode_context_parallel_size": 2}, "decode_context_parallel_size 2"),
        (caches(spec()), {"nnodes_within_dp": 2}, "on several hosts"),
    ],
)
def test_unsupported_settings_are_rejected_by_name(
    cache: Any, changes: dict[str, int], words: str
) -> None:
    with pytest.raises(UnsupportedByVllmConnector) as refused:
        check_supported(config(**changes), cache)
    assert words in str(refused.value)


def with_role(kv_role: str, num_batches: int = 2) -> Any:
    loads = kv_role != "kv_producer"
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_role=kv_role, is_kv_consumer=loads),
        max_concurrent_batches=num_batches,
    )


@pytest.mark.parametrize("kv_role", ["kv_consumer", "kv_both"])
def test_child_that_loads_is_rejected_in_a_producer(kv_role: str) -> None:
    with pytest.raises(UnsupportedByVllmConnector, match="use kv_both for MultiConnector"):
        check_outer_role(with_role(kv_role), with_role("kv_producer"))


@pytest.mark.parametrize(
    ("child", "outer"),
    [
        (with_role("kv_producer"), with_role("kv_producer")),
        (with_role("kv_consumer"), with_role("kv_both")),
        (with_role("kv_both"), with_role("kv_both")),
        (with_role("kv_consumer", num_batches=1), with_role("kv_producer", num_batches=1)),
        (with_role("kv_consumer"), None),
        (with_role("kv_consumer"), SimpleNamespace(kv_transfer_config=None)),
    ],
)
def test_roles_with_which_no_step_writes_to_loaded_blocks_are_accepted(
    child: Any, outer: Any
) -> None:
    check_outer_role(child, outer)


def with_children(*connectors: str) -> Any:
    children = [{"kv_connector": name} for name in connectors]
    transfer = SimpleNamespace(kv_connector_extra_config={"connectors": children})
    return SimpleNamespace(kv_transfer_config=transfer)


def test_second_child_of_the_same_kind_is_rejected_by_name() -> None:
    """Both would give their workers the same sockets."""
    with pytest.raises(UnsupportedByVllmConnector, match="2 children that are HalPoolConnector"):
        check_siblings(with_children("HalPoolConnector", "HalPoolConnector"), "HalPoolConnector")


@pytest.mark.parametrize(
    "outer",
    [
        with_children("HalPullConnector", "HalPoolConnector"),
        SimpleNamespace(kv_transfer_config=SimpleNamespace(kv_connector_extra_config={})),
        SimpleNamespace(kv_transfer_config=None),
        None,
    ],
    ids=["two kinds", "no children", "no connector", "unknown"],
)
def test_one_child_of_each_kind_is_accepted(outer: Any) -> None:
    check_siblings(outer, "HalPoolConnector")


def test_request_ids_that_may_repeat_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    """The read of a first attempt could be confirmed by the lease of a second one."""
    monkeypatch.setenv("VLLM_DISABLE_REQUEST_ID_RANDOMIZATION", "1")
    with pytest.raises(UnsupportedByVllmConnector, match="request ids, which must not repeat"):
        check_supported(config(), caches(spec()))


@pytest.mark.parametrize("option", ["enable_sleep_mode", "enable_cumem_allocator"])
def test_memory_that_vllm_can_move_is_rejected(option: str) -> None:
    """Sleep mode enables the allocator; vLLM can be sent to sleep with the allocator alone."""
    sleepy = config()
    setattr(sleepy.model_config, option, True)
    with pytest.raises(UnsupportedByVllmConnector, match="sleep mode, or its allocator"):
        check_supported(sleepy, caches(spec()))


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
@pytest.mark.parametrize("value", ["True", "true", "False"])
def test_a_kv_cache_of_many_allocations_is_rejected(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, f"max_split_size_mb:512, expandable_segments: {value}")
    if value == "False":
        check_supported(config(), caches(spec()))
        return
    with pytest.raises(UnsupportedByVllmConnector, match=f"with expandable_segments in {name}: "):
        check_supported(config(), caches(spec()))


def test_every_start_is_a_new_epoch() -> None:
    first, second = (describe_instance(config(tensor_parallel_size=2)) for _ in range(2))
    assert first.engine_id != second.engine_id
    assert first.engine_id.startswith("name-")
    assert (first.num_ranks, first.sends, first.loads) == (2, True, False)


def test_step_timeout_is_that_of_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS", raising=False)
    assert describe_instance(config()).step_timeout_s == 300.0
    monkeypatch.setenv("VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS", "7200")
    assert describe_instance(config()).step_timeout_s == 7200.0


def test_fingerprint_equals_the_engines() -> None:
    assert fingerprint(model()) == model_fingerprint(EXAMPLE, "float32")
    settings = fingerprint(model(quantization="fp8")).settings
    assert settings["quantization by vLLM"] == "fp8"


YARN = {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}}


def test_overrides_by_vllm_change_the_fingerprint() -> None:
    """As --hf-overrides does, which vLLM's users apply for longer contexts."""
    plain, yarn, again = (fingerprint(model(hf_overrides=each)) for each in ({}, YARN, YARN))
    assert yarn == again != plain
    assert yarn.weights == plain.weights
    [name] = yarn.settings.keys() - plain.settings.keys()
    assert '"rope_type": "yarn"' in yarn.settings[name]
    written = json.loads((EXAMPLE / "config.json").read_text())
    same = {name: written[name] for name in ("rope_parameters", "num_hidden_layers")}
    assert fingerprint(model(hf_overrides=same)) == plain


@pytest.mark.parametrize("is_beside", [False, True])
@pytest.mark.parametrize("kind", ["longrope", "default"])
def test_context_that_selects_other_longrope_factors_changes_fingerprint(
    kind: str, is_beside: bool
) -> None:
    """By default vLLM uses the context of the short factors."""
    original = {"original_max_position_embeddings": 4096}
    text = SimpleNamespace(
        rope_parameters={"rope_type": kind} | ({} if is_beside else original),
        max_position_embeddings=131_072,
        **(original if is_beside else {}),
    )
    usual, long = (
        fingerprint(model(hf_text_config=text, max_model_len=length)) for length in (4096, 4097)
    )
    assert long == model_fingerprint(EXAMPLE, "float32")
    extra = dict(usual.settings.items() - long.settings.items())
    assert extra == ({"LongRoPE": "short factors"} if kind == "longrope" else {})


@pytest.mark.parametrize(
    "changes", [{"hf_overrides": lambda config: config}, {"hf_config_path": "org/other"}]
)
def test_another_configuration_is_compared_as_a_whole(changes: dict[str, Any]) -> None:
    def settings_of(**fields: Any) -> dict[str, str]:
        loaded = SimpleNamespace(to_json_string=lambda: json.dumps(fields))
        return fingerprint(model(hf_config=loaded, **changes)).settings

    here = settings_of(rope_theta=1e4, _name_or_path="/here", transformers_version="5.0")
    there = settings_of(rope_theta=1e4, _name_or_path="/there", transformers_version="5.1")
    assert here == there != fingerprint(model()).settings
    assert here != settings_of(rope_theta=1e6, _name_or_path="/here", transformers_version="5.0")


def test_model_without_readable_weights_is_identified_by_its_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found = fingerprint(model(model=str(tmp_path)))
    assert found.settings["told by"] == "its name"
    assert "by its name and configuration only" in caplog.text
    assert found != fingerprint(model(model=str(tmp_path), revision="other"))


def put_in_hub_cache(cache: Path, *names: str) -> None:
    """Store the example's files in the layout of the hub client's cache, as those of
    ``org/tiny``."""
    repository, commit = cache / "models--org--tiny", "0" * 40
    snapshot = repository / "snapshots" / commit
    for folder in (snapshot, repository / "refs"):
        folder.mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    for name in names:
        shutil.copy(EXAMPLE / name, snapshot)


def test_weights_are_read_from_vllm_download_dir(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With --download-dir, only the weights are there; the hub's own cache may have another model
    of that name."""
    usual, asked = tmp_path / "usual", tmp_path / "asked"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(usual))
    put_in_hub_cache(usual, "config.json")
    put_in_hub_cache(asked, *(path.name for path in EXAMPLE.glob("*.safetensors*")))
    assert fingerprint(model(model="org/tiny"), str(asked)) == model_fingerprint(EXAMPLE, "float32")
    assert fingerprint(model(model="org/tiny")).settings["told by"] == "its name"


@pytest.mark.parametrize("name", ["org/repo:Q4_K_M", "s3://bucket/model", "org/none"])
def test_model_outside_the_hubs_cache_is_identified_by_its_name(name: str) -> None:
    assert fingerprint(model(model=name)).settings["told by"] == "its name"


def test_kv_per_token() -> None:
    plain = model_kv(model(), groups(spec()))
    assert (plain.kind, plain.kv_heads, plain.plane_dims) == (AttentionKind.GQA, 8, (64, 64))
    assert (plain.layers, plain.dtype) == (32, "bfloat16")
    latent = model_kv(model(), groups(spec(MLAAttentionSpec)))
    assert (latent.kind, latent.kv_heads, latent.plane_dims) == (AttentionKind.MLA, 1, (512, 64))


def test_rope_part_of_latents_is_reordered() -> None:
    caches = {f"layers.{layer}": torch.arange(12.0).repeat(3, 1, 4, 1) for layer in range(2)}
    turn = rope_order_converter(caches, ModelKV(AttentionKind.MLA, 2, 1, (8, 4), "float32"))
    assert turn is not None
    turn((2, 0), (3, 6), PAIRS)
    turned = [*range(8), 8, 10, 9, 11]
    for cache in caches.values():
        rows = {(block, at) for block in range(3) for at in range(4)}
        found = {(block, at) for block, at in rows if cache[block, 0, at].tolist() == turned}
        assert found == {(2, 3), (0, 0), (0, 1)}
    assert rope_order_converter(caches, ModelKV(AttentionKind.GQA, 2, 1, (6, 6), "float32")) is None


def test_rope_rows_in_tensors_of_their_own_are_reordered() -> None:
    latents, rows = torch.zeros(3, 4, 1, 8), torch.arange(4.0).repeat(3, 4, 1, 1)
    kv = ModelKV(AttentionKind.MLA, 1, 1, (8, 4), "float32")
    turn = rope_order_converter({"layers.0": (latents, rows)}, kv)
    assert turn is not None
    turn((2, 0), (3, 6), PAIRS)
    turned = {
        (block, at)
        for block in range(3)
        for at in range(4)
        if rows[block, at, 0].tolist() == [0, 2, 1, 3]
    }
    assert turned == {(2, 3), (0, 0), (0, 1)}
    assert not latents.any()


def test_layers_with_sliding_window_have_their_own_blocks() -> None:
    assert model_kv(model(), groups(spec(), SLIDING)).groups == (
        KVGroup((0, 2, 4)),
        KVGroup((1, 3, 5), 128),
    )
    assert model_kv(model(), groups(SLIDING)).groups == (KVGroup((0, 1, 2, 3, 4, 5), 128),)
    assert model_kv(model(), groups(spec())).groups == ()
    kept_whole = spec(sliding_window=128)  # as when vLLM's hybrid manager is off
    assert model_kv(model(), groups(kept_whole)).groups == ()


def test_devices() -> None:
    host = describe_device(SimpleNamespace(device_type="cpu"), None)
    event = host.make_event()
    event.record()
    event.synchronize()
    host.bind_thread()
    assert (host.kind, event.query()) == ("cpu", True)
    capability = SimpleNamespace(major=9, minor=0)
    card = describe_device(
        SimpleNamespace(device_type="cuda", get_device_capability=lambda: capability), 1
    )
    assert (card.hardware.backend, card.hardware.generation) == ("cuda", "sm_90")


@pytest.mark.parametrize(
    ("stages", "data_parallel", "is_moe", "may_wait"),
    [
        (1, 1, False, True),
        (1, 2, False, True),
        (1, 1, True, True),
        (1, 2, True, False),
        (2, 1, False, False),
    ],
)
def test_idle_steps_wait_only_if_they_delay_no_other(
    stages: int, data_parallel: int, is_moe: bool, may_wait: bool
) -> None:
    config = SimpleNamespace(
        model_config=SimpleNamespace(is_moe=is_moe),
        parallel_config=SimpleNamespace(
            pipeline_parallel_size=stages, data_parallel_size=data_parallel
        ),
    )
    assert steps_may_wait(config) is may_wait
