"""Which kinds of attention the connectors support, by vLLM's own KV-cache groups.

vLLM groups the layers of a model by their specs, and differently with its hybrid manager off, as it
is beside a connector that does not support groups.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from support.vllm_scheduler import attention, engine_config
from vllm.v1.core.kv_cache_utils import get_kv_cache_groups
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    MambaSpec,
)

from mooncake_vllm.errors import UnsupportedByVllmConnector
from mooncake_vllm.vllm_instance import check_supported

NUM_BLOCKS = 30
POOL = "dram=1MiB,chunk=8"
WINDOW = 64
FULL, SLIDING = attention(0), attention(WINDOW)
CHUNKED = ChunkedLocalAttentionSpec(
    block_size=FULL.block_size,
    num_kv_heads=FULL.num_kv_heads,
    head_size=FULL.head_size,
    dtype=FULL.dtype,
    attention_chunk_size=WINDOW,
)
STATES = MambaSpec(
    block_size=FULL.block_size,
    shapes=((FULL.page_size_bytes // 4,),),
    dtypes=(torch.float32,),
)
GEMMA = [SLIDING, SLIDING, FULL, SLIDING]
MISTRAL = [SLIDING] * 4
LLAMA_4 = [CHUNKED, CHUNKED, CHUNKED, FULL]
JAMBA = [STATES, STATES, STATES, FULL]


def check(layers: Sequence[KVCacheSpec], *, is_hybrid: bool) -> int:
    """Check whether the connectors support these layers; returns their number of groups."""
    config: Any = copy.deepcopy(
        engine_config(
            "kv_both", "HalPullConnector", "recompute", is_async=False, is_hybrid=is_hybrid
        )
    )
    config.cache_config.kv_cache_layout = "LBHNC"
    named = {f"model.layers.{index}.attn": each for index, each in enumerate(layers)}
    groups = get_kv_cache_groups(config, named)
    check_supported(config, KVCacheConfig(NUM_BLOCKS, [], groups))
    return len(groups)


def test_windows_beside_full_attention_are_supported_with_groups_or_without() -> None:
    assert check(GEMMA, is_hybrid=True) > 1
    assert check(GEMMA, is_hybrid=False) == 1


@pytest.mark.parametrize("is_hybrid", [True, False])
def test_windows_of_all_layers_are_one_group(is_hybrid: bool) -> None:
    """vLLM drops blocks that have left them, even with its hybrid manager off."""
    assert check(MISTRAL, is_hybrid=is_hybrid) == 1


def test_chunked_attention_is_supported_with_the_hybrid_manager_off() -> None:
    """As vLLM has it by default, with any connector or none."""
    assert check(LLAMA_4, is_hybrid=False) == 1
    with pytest.raises(UnsupportedByVllmConnector, match="ChunkedLocalAttentionSpec"):
        check(LLAMA_4, is_hybrid=True)


def test_recurrent_states_are_rejected_by_name() -> None:
    with pytest.raises(UnsupportedByVllmConnector, match="MambaSpec"):
        check(JAMBA, is_hybrid=True)
    with pytest.raises(ValueError, match="promote"):  # vLLM's own
        check(JAMBA, is_hybrid=False)


@pytest.mark.parametrize(
    ("connector", "pool"),
    [
        ("HalPullConnector", None),
        ("HalPushConnector", None),
        ("HalPoolConnector", POOL),
        ("HalPullConnector", POOL),  # in a MultiConnector
    ],
)
def test_hybrid_manager_stays_on(connector: str, pool: str | None) -> None:
    found = engine_config(
        "kv_both", connector, "recompute", is_async=False, pool=pool, is_hybrid=None
    )
    assert not found.scheduler_config.disable_hybrid_kv_cache_manager
