"""The conformance suite over the CUDA kernels, interpreted; needs TRITON_INTERPRET=1."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from support.cuda_emulation import emulated_backend
from triton.runtime.interpreter import InterpreterBuilder

from mooncake_hal.backend import Backend
from mooncake_hal.testing.backends_data import Shape
from mooncake_hal.testing.backends_experts import ExpertsSuite
from mooncake_hal.testing.backends_fp8 import Fp8ExpertsSuite, Fp8LinearSuite
from mooncake_hal.testing.backends_latent import LatentSuite, latent_shape
from mooncake_hal.testing.backends_ops import MakeCase, OpsSuite, assert_same, oracle
from mooncake_hal.testing.backends_rope_writes import RopeWritesSuite
from mooncake_hal.testing.backends_rows import RowsSuite, random
from mooncake_hal.testing.backends_sampling import SamplingSuite
from mooncake_hal.testing.backends_scaled_kv import ScaledKVSuite
from mooncake_hal_cuda import attention_launch
from mooncake_hal_cuda.kernels import gemv
from mooncake_hal_cuda.launch_tuning import Splitting, Tuning


def reordered(
    order: Sequence[int], sequences: int, set_place: Callable[..., None]
) -> Callable[[InterpreterBuilder, int, int, int], None]:
    """Runs the programs of each sequence in another order: those of all sequences, one of each,
    follow each other along z."""

    def set_reordered(builder: InterpreterBuilder, x: int, y: int, z: int) -> None:
        set_place(builder, x, y, order[z // sequences] * sequences + z % sequences)

    return set_reordered


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
    long_context = 4200  # the interpreter takes milliseconds per tile

    @pytest.fixture(scope="module")
    @staticmethod
    def backend() -> Backend:
        return emulated_backend()

    def test_prompts_of_one_token_are_not_decodes(self, backend: Backend, case: MakeCase) -> None:
        made = case(Shape(), ((1, 40), (1, 33), (1, 700)))
        made.batch = replace(made.batch, num_decodes=1)
        self.check_decode(backend, made)
        self.check_prefill(backend, made)

    @pytest.mark.parametrize("dims", [(64, 30), (1500, 7)])
    def test_single_row_with_few_columns_per_program(
        self, backend: Backend, dims: tuple[int, int], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Inputs that take one step and several; other inputs in this suite are larger."""
        monkeypatch.setattr(gemv, "COLUMNS", 2)
        x = random(backend, 1, dims[0], dtype="bfloat16")
        weight = random(backend, *reversed(dims), dtype="bfloat16", seed=1) * dims[0] ** -0.5
        bias = random(backend, dims[1], dtype="bfloat16", seed=2)
        found = backend.ops.linear(x, backend.ops.pack_weight(weight), bias)
        assert_same(found, oracle.linear(x, weight, bias), "bfloat16")

    @pytest.mark.parametrize(("programs", "least"), [(1, 1), (3, 1), (2, 8), (3, 2)])
    def test_programs_with_several_splits_give_the_same_bits(
        self,
        backend: Backend,
        case: MakeCase,
        programs: int,
        least: int,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """Bit-identical, since the number of programs depends on the batch."""
        made = case(Shape(), ((1, 700), (1, 33), (1, 1500)))
        arguments = (made.query, made.kv.key, made.kv.value, made.batch, 0.1)
        expected = backend.ops.decode_attention(*arguments)
        monkeypatch.setattr(Tuning, "programs", lambda *_: programs)
        monkeypatch.setattr(Tuning, "min_splits", lambda *_: least)
        assert torch.equal(backend.ops.decode_attention(*arguments), expected)

    def test_the_last_program_merges(
        self, backend: Backend, case: MakeCase, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Bit-identical in every launch; each launch resets its arrival counts."""
        made = case(Shape(), ((1, 700), (1, 33), (1, 256), (1, 1500)))
        arguments = (made.query, made.kv.key, made.kv.value, made.batch, 0.1)
        expected = backend.ops.decode_attention(*arguments)
        counts: list[torch.Tensor] = []
        make_arrivals = attention_launch._arrivals

        def arrivals(count: int, device: torch.device) -> torch.Tensor:
            counts.append(make_arrivals(count, device))
            return counts[-1]

        monkeypatch.setattr(attention_launch, "_arrivals", arrivals)
        for order in ((5, 0, 4, 2, 1, 3), (1, 3, 0, 2), (1, 0)):
            with monkeypatch.context() as patch:
                set_place = reordered(order, 4, InterpreterBuilder.set_grid_idx)
                patch.setattr(Tuning, "programs", lambda *_, order=order: len(order))
                patch.setattr(InterpreterBuilder, "set_grid_idx", set_place)
                assert torch.equal(backend.ops.decode_attention(*arguments), expected)
        assert len(counts) == 3
        assert not any(count.any() for count in counts)

    def test_latents_of_one_split_need_no_merge(
        self, backend: Backend, latent_case: MakeCase, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Beside a longer context, which is the only one to be merged."""
        made = latent_case(latent_shape(backend), ((1, 1500), (1, 33), (1, 256)))
        arguments = (made.query, made.kv.key, made.kv.value, made.batch, 0.1)
        expected = backend.ops.mla_decode_attention(*arguments)
        monkeypatch.setattr(attention_launch, "_merge", lambda out, *_: out)
        assert torch.equal(backend.ops.mla_decode_attention(*arguments)[1:], expected[1:])

    def test_device_that_needs_no_splits(
        self,
        backend: Backend,
        case: MakeCase,
        latent_case: MakeCase,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """Long contexts are a single split each, and nothing is merged."""
        monkeypatch.setattr(Tuning, "splitting", lambda *_: Splitting(256, 1))
        self.check_decode(backend, case(Shape(), ((1, 700), (1, 33))))
        self.check_latent(backend, latent_case(latent_shape(backend), ((1, 700), (1, 33))))

    @pytest.mark.parametrize("programs", [1, 3])
    def test_programs_with_several_splits_of_latents_give_the_same_bits(
        self,
        backend: Backend,
        latent_case: MakeCase,
        programs: int,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """Bit-identical, as is each row of a batch computed alone."""
        shape = latent_shape(backend)
        made = latent_case(shape, ((1, 700), (1, 33), (1, 1500)))
        arguments = (made.query, made.kv.key, made.kv.value, made.batch, 0.1)
        expected = backend.ops.mla_decode_attention(*arguments)
        monkeypatch.setattr(Tuning, "programs", lambda *_: programs)
        assert torch.equal(backend.ops.mla_decode_attention(*arguments), expected)
        self.check_latent(backend, made)
