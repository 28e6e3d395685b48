"""The format of pages: known for vLLM's own attention, probed for third-party backends."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.vllm_caches import ORDERS, make_caches

from mooncake_hal.kv.geometry import AttentionKind
from mooncake_vllm.errors import UnsupportedByVllmConnector
from mooncake_vllm.vllm_memory import ModelKV
from mooncake_vllm.vllm_pages import page_format

MODEL = ModelKV(AttentionKind.GQA, 2, 3, (8, 4), "float32")
Update = Callable[..., None]


def linear(layer: Any, key: Any, value: Any, cache: Any, slots: Any) -> None:
    """The linear page format of GPUs."""
    rows = torch.cat([key, value], dim=-1)
    cache[slots // cache.shape[2], :, slots % cache.shape[2]] = rows


def k_in_columns(layer: Any, key: Any, value: Any, cache: Any, slots: Any) -> None:
    """K of a head is stored dimension by dimension, as for matrix instructions."""
    for block in slots.unique() // cache.shape[2]:
        keys = torch.empty_like(key)
        keys[slots] = key
        columns = keys.permute(1, 2, 0).reshape(keys.shape[1], *keys.shape[::2])
        rows = torch.cat([columns, torch.empty_like(value)[slots.argsort()].transpose(0, 1)], -1)
        cache[block] = rows


def v_before_k(layer: Any, key: Any, value: Any, cache: Any, slots: Any) -> None:
    """Linear, with V before K."""
    linear(layer, value, key, cache, slots)


def broken(layer: Any, key: Any, value: Any, cache: Any, slots: Any) -> None:
    raise RuntimeError("no kernel for this shape")


def attention(module: str, update: Update | None = None, **facts: Any) -> SimpleNamespace:
    """A layer with the attention of that module."""
    names: dict[str, Any] = {
        "__module__": module,
        "forward_includes_kv_cache_update": update is None,
    }
    names["is_mla"] = classmethod(lambda backend: "mla" in module)
    backend = type("Backend", (), names)
    impl = SimpleNamespace() if update is None else SimpleNamespace(do_kv_cache_update=update)
    return SimpleNamespace(get_attn_backend=lambda: backend, impl=impl, **facts)


def named(*layers: Any, order: str = "LBHNC", block_size: int = 6) -> tuple[Any, ...]:
    """Determine the page format; the caches are filled with random values."""
    caches = make_caches(MODEL, order, 4, block_size).layers
    for cache in caches.values():
        cache.copy_(torch.rand(cache.shape))
    each = dict(zip(caches, layers * 2 if len(layers) == 1 else layers, strict=True))
    return "cpu", each, caches, MODEL.plane_dims


def test_vllms_own_pages_are_named_by_their_packing() -> None:
    of_vllm = attention("vllm.v1.attention.backends.cpu_attn", isa="amx")
    assert page_format(*named(of_vllm, block_size=128)) == "vllm-cpu/amx/128"
    unnamed = attention("vllm.v1.attention.backends.cpu_attn")
    assert page_format(*named(unnamed, block_size=16)) == "vllm-cpu/unknown/16"
    assert page_format("cuda", *named(of_vllm)[1:]) == "linear"


def test_vllms_own_latents_are_linear_on_cpus_too() -> None:
    latents = attention("vllm.v1.attention.backends.mla.cpu_mla")
    assert page_format(*named(latents, block_size=16)) == "linear"


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("device_kind", ["cpu", "cuda"])
def test_third_party_attention_with_adjacent_k_and_v_is_linear(
    order: str, device_kind: str
) -> None:
    _, layers, caches, dims = named(attention("elsewhere.attention", linear), order=order)
    before = {name: cache.clone() for name, cache in caches.items()}
    assert page_format(device_kind, layers, caches, dims) == "linear"
    assert all(torch.equal(caches[name], cache) for name, cache in before.items())


@pytest.mark.parametrize("update", [k_in_columns, v_before_k])
@pytest.mark.parametrize("device_kind", ["cpu", "cuda"])
def test_third_party_attention_with_packing_is_rejected_by_name(
    update: Update, device_kind: str
) -> None:
    _, layers, caches, dims = named(attention("elsewhere.attention", update))
    before = {name: cache.clone() for name, cache in caches.items()}
    with pytest.raises(UnsupportedByVllmConnector, match=r"elsewhere\.attention\.Backend packs"):
        page_format(device_kind, layers, caches, dims)
    assert all(torch.equal(caches[name], cache) for name, cache in before.items())


@pytest.mark.parametrize(
    ("update", "words"),
    [
        (None, r"elsewhere\.Backend writes .* writes KV within its forward"),
        (broken, r"failed when it was probed: RuntimeError\('no kernel for this shape'\)"),
    ],
)
def test_unprobeable_backend_is_rejected_by_name(update: Update | None, words: str) -> None:
    with pytest.raises(UnsupportedByVllmConnector, match=words):
        page_format(*named(attention("elsewhere", update)))


def test_all_layers_must_use_one_attention_if_vllm_packs() -> None:
    both = attention("vllm.cpu_attn", isa="amx"), attention("elsewhere", linear)
    with pytest.raises(UnsupportedByVllmConnector, match=r"elsewhere\.Backend, whose pages are"):
        page_format(*named(*both))
    assert page_format("cuda", *named(*both)[1:]) == "linear"
