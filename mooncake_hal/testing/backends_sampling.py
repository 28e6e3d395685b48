"""The suite's tests of sampling: sampled tokens, compared with the reference's probabilities."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import Tensor

from mooncake_hal.backend import Backend, SamplingMetadata, SamplingOps
from mooncake_hal.reference import sampling_shares

VOCAB = 3000
TOLERANCE = 1e-6
"""Tolerance of cumulative probabilities: at the boundary of two tokens, either may be sampled."""
UNIFORMS = torch.tensor([0.0, 0.2, 0.5, 0.999999], dtype=torch.float64)
FILTERS: tuple[dict[str, Any], ...] = (
    {},
    {"top_k": 50},
    {"top_k": 2000},
    {"top_p": 0.9},
    {"min_p": 0.2},
    {"top_k": 1000, "top_p": 0.8},
    {"top_k": 20, "top_p": 0.95, "min_p": 0.05},
)


def make_sampling_metadata(
    uniforms: Tensor,  # [rows]
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> SamplingMetadata:
    """Create metadata with the same parameters for every row, on the CPU."""
    same = torch.ones(len(uniforms))
    return SamplingMetadata(
        same * temperature, same.int() * top_k, same * top_p, same * min_p, uniforms.double()
    )


def on_device(backend: Backend, sampling_metadata: SamplingMetadata) -> SamplingMetadata:
    """Copy the metadata to the backend's device."""
    names = ("temperatures", "top_ks", "top_ps", "min_ps", "uniforms")
    device = backend.runtime.device(0)
    return SamplingMetadata(*(getattr(sampling_metadata, name).to(device) for name in names))


class SamplingSuite:
    """Cases for ``SamplingOps``; the ``backend`` fixture comes from the concrete class."""

    def sample(
        self, backend: Backend, logits: Tensor, sampling_metadata: SamplingMetadata
    ) -> Tensor:
        """Sample tokens and return them on the CPU; skips the test if the backend does not
        sample."""
        if not backend.capabilities.sampling:
            pytest.skip(f"{backend.name} leaves sampling to torch")
        ops = cast(SamplingOps, backend.ops)
        logits = logits.to(backend.runtime.device(0))
        return ops.sample(logits, on_device(backend, sampling_metadata)).cpu()

    @pytest.mark.parametrize("top_k", [0, 1, 50])
    @pytest.mark.parametrize("top_p", [1.0, 0.9, 0.3])
    @pytest.mark.parametrize("min_p", [0.0, 0.05])
    def test_filters(self, backend: Backend, top_k: int, top_p: float, min_p: float) -> None:
        """Every filter, with a tie at the top and masked tokens."""
        logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(top_k)) * 3
        logits[:, 7] = logits.amax(1)
        logits[:, 100:200] = float("-inf")
        sampling_metadata = make_sampling_metadata(UNIFORMS, 0.8, top_k, top_p, min_p)
        self.check_sampled(backend, logits, sampling_metadata)

    @pytest.mark.parametrize("knobs", FILTERS, ids=str)
    def test_ties_at_a_threshold_are_all_kept(
        self, backend: Backend, knobs: dict[str, Any]
    ) -> None:
        """With few distinct logits, every filter's threshold is a tie of many tokens."""
        generator = torch.Generator().manual_seed(4)
        logits = torch.randint(0, 40, (4, VOCAB), generator=generator) / 4
        self.check_sampled(backend, logits, make_sampling_metadata(UNIFORMS, 1.0, **knobs))

    @pytest.mark.parametrize("knobs", FILTERS, ids=str)
    @pytest.mark.parametrize("vocab_size", [20_001, 151_936])
    def test_flat_rows_of_large_vocabularies(
        self, backend: Backend, knobs: dict[str, Any], vocab_size: int
    ) -> None:
        """Filters leave tens of thousands of candidates; in one row, all are nearly equal."""
        logits = torch.randn(2, vocab_size, generator=torch.Generator().manual_seed(5))
        logits[1] *= 1e-3
        self.check_sampled(backend, logits, make_sampling_metadata(UNIFORMS[1:3], 1.0, **knobs))

    @pytest.mark.parametrize("knobs", FILTERS, ids=str)
    def test_rows_with_few_candidates(self, backend: Backend, knobs: dict[str, Any]) -> None:
        """A single unmasked token; fewer tokens than top-k; one token far above all others; all
        tokens equal."""
        logits = torch.full((4, VOCAB), float("-inf"))
        logits[0, 2222] = -3.0
        logits[1, 5::250] = torch.linspace(-1, 1, 12)
        logits[2] = 0.0
        logits[2, 77] = 80.0
        logits[3] = 1.5
        sampling_metadata = make_sampling_metadata(UNIFORMS, 1.0, **knobs)
        assert self.check_sampled(backend, logits, sampling_metadata)[[0, 2]].tolist() == [2222, 77]

    def test_every_row_has_filters_of_its_own(self, backend: Backend) -> None:
        """Greedy, unfiltered, narrowly and widely filtered rows in one batch."""
        rows = 12
        generator = torch.Generator().manual_seed(6)
        logits = torch.randn(rows, VOCAB, generator=generator) * 4
        sampling_metadata = SamplingMetadata(
            torch.tensor([0.0, 0.7, 1.0, 2.5]).repeat(3),
            torch.tensor([0, 1, 20, VOCAB - 1, VOCAB, 2 * VOCAB], dtype=torch.int32).repeat(2),
            torch.tensor([1.0, 0.9, 0.5]).repeat(4),
            torch.tensor([0.0, 0.0, 0.0, 0.1, 1.0, 0.0]).repeat_interleave(2),
            torch.rand(rows, generator=generator, dtype=torch.float64),
        )
        self.check_sampled(backend, logits, sampling_metadata)

    def check_sampled(
        self, backend: Backend, logits: Tensor, sampling_metadata: SamplingMetadata
    ) -> Tensor:
        """Check sampled tokens against the reference's probabilities, and return them."""
        found = self.sample(backend, logits, sampling_metadata)
        shares, uniforms = sampling_shares(logits, sampling_metadata), sampling_metadata.uniforms
        rows = torch.arange(len(logits))
        until = shares.cumsum(1)[rows, found]
        assert (shares[rows, found] > 0).all()
        assert (until > uniforms - TOLERANCE).all()
        assert (until - shares[rows, found] <= uniforms + TOLERANCE).all()
        return found

    def test_temperature_0_takes_the_first_largest_logit(self, backend: Backend) -> None:
        """Temperature 0 is greedy, whatever the uniform number."""
        logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(1))
        logits[0, [5, 17]] = 50.0
        found = self.sample(backend, logits, make_sampling_metadata(torch.full((3,), 0.99), 0.0))
        assert found.tolist() == logits.argmax(1).tolist()

    def test_tokens_are_sampled_in_proportion(self, backend: Backend) -> None:
        """With evenly spaced uniform numbers, each token's count differs from its expected count by
        at most one."""
        logits = torch.randn(1, 40, generator=torch.Generator().manual_seed(2))
        uniforms = (torch.arange(100, dtype=torch.float64) + 0.5) / 100
        sampling_metadata = make_sampling_metadata(uniforms, 1.3, top_p=0.95)
        found = self.sample(backend, logits.expand(100, -1).contiguous(), sampling_metadata)
        shares = sampling_shares(logits, make_sampling_metadata(uniforms[:1], 1.3, top_p=0.95))[0]
        counts = torch.bincount(found, minlength=40)
        assert (counts - shares * 100).abs().max() <= 1
        assert counts[shares == 0].sum() == 0

    def test_a_row_does_not_depend_on_others(self, backend: Backend) -> None:
        """A row's token does not depend on its batch, nor, therefore, on the rank."""
        generator = torch.Generator().manual_seed(3)
        logits = torch.randn(16, VOCAB, generator=generator) * 2
        uniforms = torch.rand(16, generator=generator, dtype=torch.float64)
        together = self.sample(
            backend, logits, make_sampling_metadata(uniforms, 0.9, top_k=200, top_p=0.9)
        )
        for rows in (slice(0, 1), slice(7, 8), slice(11, 16)):
            some = make_sampling_metadata(uniforms[rows], 0.9, top_k=200, top_p=0.9)
            assert torch.equal(self.sample(backend, logits[rows], some), together[rows])

    def test_an_empty_batch_samples_nothing(self, backend: Backend) -> None:
        """An empty batch gives an empty result."""
        found = self.sample(backend, torch.empty(0, VOCAB), make_sampling_metadata(torch.empty(0)))
        assert found.shape == (0,)
        assert self.argmax(backend, torch.empty(0, VOCAB)).shape == (0,)

    def argmax(self, backend: Backend, logits: Tensor) -> Tensor:
        """The op's result on the CPU; skips the test as ``sample`` does."""
        if not backend.capabilities.sampling:
            pytest.skip(f"{backend.name} leaves sampling to torch")
        ops = cast(SamplingOps, backend.ops)
        return ops.argmax(logits.to(backend.runtime.device(0))).cpu()

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
    @pytest.mark.parametrize("vocab_size", [40, VOCAB, 20_001, 151_936])
    def test_argmax_is_the_first_largest_logit(
        self, backend: Backend, dtype: str, vocab_size: int
    ) -> None:
        """In 16 bits many logits are equal; one row is a view with another stride."""
        logits = torch.randn(5, vocab_size, generator=torch.Generator().manual_seed(vocab_size))
        logits = logits.to(getattr(torch, dtype))
        logits[0, [vocab_size // 2, vocab_size - 1]] = 9.0
        logits[1] = -3.0
        logits[2, : vocab_size - 1] = float("-inf")
        assert self.argmax(backend, logits).tolist() == logits.argmax(1).tolist()
        assert self.argmax(backend, logits[::2]).tolist() == logits[::2].argmax(1).tolist()

    @pytest.mark.parametrize("value", [float("nan"), float("inf")])
    def test_argmax_of_rows_without_a_finite_largest_logit(
        self, backend: Backend, value: float
    ) -> None:
        """-1, and rows next to them keep their tokens."""
        logits = torch.randn(4, 20_001, generator=torch.Generator().manual_seed(8))
        logits[1, 15_000] = value
        logits[2] = float("-inf")
        first, last = logits[0].argmax().item(), logits[3].argmax().item()
        assert self.argmax(backend, logits).tolist() == [first, -1, -1, last]
