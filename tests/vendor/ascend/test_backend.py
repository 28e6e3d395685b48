"""The backend suite over the real torch-npu: its allocator, streams, events, schemas and shapes.

Without an NPU, values come from the reference kernels and the CPU; graphs and HCCL need an NPU.
"""

from __future__ import annotations

import subprocess
import sys

import pytest
from support import vendor_npu

from mooncake_hal.backend import Backend
from mooncake_hal.testing.backends import BackendBasics
from mooncake_hal.testing.backends_experts import ExpertsSuite
from mooncake_hal.testing.backends_latent import LatentSuite
from mooncake_hal.testing.backends_native_latents import NativeLatentsSuite
from mooncake_hal.testing.backends_ops import OpsSuite
from mooncake_hal.testing.backends_rows import RowsSuite


class TestRealTorchNpu(
    BackendBasics, OpsSuite, RowsSuite, ExpertsSuite, LatentSuite, NativeLatentsSuite
):
    test_graphs_as_promised = None  # CANN captures graphs
    test_captured_decodes_follow_their_batch = None  # needs captured graphs

    @pytest.fixture
    def backend(self) -> Backend:
        return vendor_npu.backend()


OPS = (
    "npu_add_rms_norm",
    "npu_fused_infer_attention_score",
    "npu_fused_infer_attention_score_v2",
    "npu_grouped_matmul",
    "npu_kv_rmsnorm_rope_cache",
    "npu_moe_init_routing_v2",
    "npu_moe_token_unpermute",
    "npu_rms_norm",
    "npu_rotary_mul",
    "npu_scatter_pa_kv_cache",
    "npu_swiglu",
)


def test_shapes_were_compared_with_meta_kernels_of_torch_npu() -> None:
    """Runs after the suite: at least one comparison for every op that the backend calls."""
    from support.cann_stub.registry import checked

    assert {name for name in OPS if not checked[name]} == set()


FORK = """
import os, sys
from support import vendor_npu  # the stub, before torch-npu
import torch_npu
assert not torch_npu.npu.is_initialized()
if (child := os.fork()) == 0:
    torch_npu.npu.init()
    memory = vendor_npu.backend().memory.allocate(4096, 0)
    memory.tensor.fill_(7)
    assert int(memory.tensor.cpu()[5]) == 7
    os._exit(0)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_rank_may_be_forked_after_importing_torch_npu() -> None:
    """As ranks are forked, from a process that has imported it with torch."""
    done = subprocess.run([sys.executable, "-c", FORK], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
