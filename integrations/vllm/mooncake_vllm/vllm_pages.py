"""Determines the format of a page of vLLM's KV cache: linear, token after token, or packed for
particular CPU instructions.

The views ``[blocks, heads, tokens, content]`` that vLLM passes define where a page is, but not how
an attention backend fills it: vLLM's CPU attention packs K, with the same shapes and strides. All
other backends of vLLM keep a token's K and V, or its latent and rope, side by side, on CPUs, too. A
third-party backend, from vLLM's registry, is probed: it writes one page, and the result decides.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from mooncake_vllm.errors import UnsupportedByVllmConnector
from mooncake_vllm.vllm_memory import LINEAR

PACKING_DEVICES = ("cpu",)
"""Devices on which vLLM's own attention packs pages, except for MLA."""


def page_format(
    device_kind: str,
    layers: Mapping[str, Any],
    caches: Mapping[str, Any],
    plane_dims: Sequence[int],
) -> str:
    """The name of the page format: ``LINEAR``, or one that is compatible only with itself.

    Args:
        device_kind: kind of the caches' device.
        layers: vLLM's attention layers, by name.
        caches: the view of each layer, ``[blocks, heads, tokens, content]``. A probed backend
            writes into one page, whose content is restored.
        plane_dims: elements of K and of V, per token and head.

    Raises:
        UnsupportedByVllmConnector: a backend's format can't be determined, or it is neither linear
            nor known.
    """
    packed: list[Any] = []
    others: dict[Any, str] = {}  # third-party backends, and a layer that uses each
    for name, layer in layers.items():
        backend = layer.get_attn_backend()
        if str(backend.__module__).partition(".")[0] == "vllm":
            if device_kind in PACKING_DEVICES and not backend.is_mla():
                packed.append(layer)
        else:
            others.setdefault(backend, name)
    for backend, name in others.items():
        _check_linear(backend, layers[name], caches[name], plane_dims)
    if not packed:
        return LINEAR
    if others:
        raise UnsupportedByVllmConnector(
            "some layers use vLLM's attention, whose pages are packed, and others use "
            f"{', '.join(sorted(map(_title, others)))}, whose pages are linear; wanted one for all"
        )
    return _packing(packed, next(iter(caches.values())).shape[2])


def _packing(layers: Iterable[Any], block_size: int) -> str:
    packings = sorted({str(getattr(layer, "isa", "unknown")) for layer in layers})
    return f"vllm-cpu/{'+'.join(packings)}/{block_size}"


def _check_linear(backend: Any, layer: Any, cache: torch.Tensor, plane_dims: Sequence[int]) -> None:
    """Check, by a write, that a third-party backend keeps a token's K and V side by side."""
    impl = getattr(layer, "impl", None)
    update = getattr(impl, "do_kv_cache_update", None)
    if update is None or getattr(backend, "forward_includes_kv_cache_update", True):
        raise UnsupportedByVllmConnector(
            f"the format in which the attention {_title(backend)} writes pages of KV is unknown: "
            "it is not vLLM's own, and writes KV within its forward; wanted one with "
            "do_kv_cache_update, which is probed, and forward_includes_kv_cache_update = False"
        )
    page = cache[:1]
    before = page.clone()
    try:
        found, wanted = _write_page(update, layer, page, plane_dims)
    except Exception as exc:  # third-party code may raise anything
        raise UnsupportedByVllmConnector(
            f"the format in which the attention {_title(backend)} writes pages of KV is unknown: "
            f"its do_kv_cache_update failed when it was probed: {exc!r}"
        ) from exc
    finally:
        page.copy_(before)
    if not torch.equal(found, wanted):
        raise UnsupportedByVllmConnector(
            f"the attention {_title(backend)} packs pages of KV: what it wrote for a token is not "
            "that token's K and V, side by side. Peers can't read such pages; use vLLM's own "
            "attention, or one that keeps [blocks, heads, tokens, K|V]"
        )


def _write_page(
    update: Any, layer: Any, page: torch.Tensor, plane_dims: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:  # both [heads, tokens, content]
    """Fill a page, tokens out of order; returns its content, and what was written."""
    _, heads, tokens, content = page.shape
    generator = torch.Generator().manual_seed(0)
    # Integers, which every KV dtype can represent.
    drawn = torch.randint(1, 100, (tokens, heads, content), generator=generator)
    written = drawn.to(page.device, page.dtype)
    key, value = written[..., : plane_dims[0]], written[..., plane_dims[0] :]
    slots = torch.randperm(tokens, generator=generator).to(page.device)
    with torch.no_grad():
        update(layer, key[slots].contiguous(), value[slots].contiguous(), page, slots)
    return page[0].clone(), written.transpose(0, 1)


def _title(backend: Any) -> str:
    return f"{backend.__module__}.{backend.__qualname__}"
