"""The conformance suite over the CUDA kernels, interpreted; needs TRITON_INTERPRET=1."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.cuda_emulation import emulated_backend

from mooncake_hal.backend import Backend
from mooncake_hal.testing.backends_data import Shape
from mooncake_hal.testing.backends_experts import ExpertsSuite
from mooncake_hal.testing.backends_fp8 import Fp8ExpertsSuite, Fp8LinearSuite
from mooncake_hal.testing.backends_latent import LatentSuite, latent_shape
from mooncake_hal.testing.backends_ops import MakeCase, OpsSuite
from mooncake_hal.testing.backends_rope_writes import RopeWritesSuite
from mooncake_hal.testing.backends_rows import RowsSuite
from mooncake_hal.testing.backends_sampling import SamplingSuite
from mooncake_hal.testing.backends_scaled_kv import ScaledKVSuite
from mooncake_hal_cuda.launch_tuning import Tuning


class TestKernels(
    OpsSuite,
    RowsSuite,
    ExpertsSuite,
    LatentSuite,
    RopeWritesSuite,
    SamplingSuite,
    ScaledKVSuite,
    Fp8LinearSuite,
    Fp8ExpertsSuite,
):
    @pytest.fixture(scope="module")
    @staticmethod
    def backend() -> Backend:
        return emulated_backend()

    def test_prompts_of_one_token_are_no_decodes(self, backend: Backend, case: MakeCase) -> None:
        made = case(Shape(), ((1, 40), (1, 33), (1, 700)))
        made.batch = replace(made.batch, num_decodes=1)
        self.check_decode(backend, made)
        self.check_prefill(backend, made)

    @pytest.mark.parametrize("programs", [1, 3])
    def test_programs_that_take_several_splits_say_the_same(
        self, backend: Backend, case: MakeCase, programs: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """To the bit: how many there are depends on the batch."""
        made = case(Shape(), ((1, 700), (1, 33), (1, 1500)))
        arguments = (made.query, made.kv.key, made.kv.value, made.batch, 0.1)
        expected = backend.ops.decode_attention(*arguments)
        monkeypatch.setattr(Tuning, "programs", lambda *_: programs)
        assert torch.equal(backend.ops.decode_attention(*arguments), expected)

    @pytest.mark.parametrize("programs", [1, 3])
    def test_programs_that_take_several_splits_of_latents_say_the_same(
        self,
        backend: Backend,
        latent_case: MakeCase,
        programs: int,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """To the bit, as each row of a batch does alone."""
        shape = latent_shape(backend)
        made = latent_case(shape, ((1, 700), (1, 33), (1, 1500)))
        arguments = (made.query, made.kv.key, made.kv.value, made.batch, 0.1)
        expected = backend.ops.mla_decode_attention(*arguments)
        monkeypatch.setattr(Tuning, "programs", lambda *_: programs)
        assert torch.equal(backend.ops.mla_decode_attention(*arguments), expected)
        self.check_latent(backend, made)
