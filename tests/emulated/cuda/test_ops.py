"""The conformance suite over the CUDA kernels, interpreted; needs TRITON_INTERPRET=1."""

from __future__ import annotations

import pytest
from support.cuda_emulation import emulated_backend

from mooncake_hal.backend import Backend
from mooncake_hal.testing.backends_experts import ExpertsSuite
from mooncake_hal.testing.backends_latent import LatentSuite
from mooncake_hal.testing.backends_ops import OpsSuite
from mooncake_hal.testing.backends_rows import RowsSuite


class TestKernels(OpsSuite, RowsSuite, ExpertsSuite, LatentSuite):
    @pytest.fixture(scope="module")
    @staticmethod
    def backend() -> Backend:
        return emulated_backend()
