"""Rotary position embeddings: the inverse frequencies of every supported scaling, and the cos/sin
table.

Su et al. 2021 (RoFormer) in the rotate-half form of GPT-NeoX; see each scaling for its source.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Positions divided by ``factor`` (kaiokendev 2023; Chen et al. 2023, arXiv 2306.15595)."""

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Llama 3.1: low frequencies are divided by ``factor``, high ones kept, with a ramp between.

    Args:
        factor: divisor of the low frequencies.
        low_freq_factor, high_freq_factor: frequencies with wavelengths above ``original_positions /
            low_freq_factor`` are scaled fully, those with wavelengths below ``original_positions /
            high_freq_factor`` not at all.
        original_positions: context length of the pre-training.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_positions: int


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """YaRN (Peng et al. 2023, arXiv 2309.00071): a ramp over dimensions, and a factor on attention.

    Args:
        factor: divisor of the interpolated frequencies.
        original_positions: context length of the pre-training.
        beta_fast, beta_slow: rotations over that context at which the ramp begins and ends.
        attention_factor: multiplies cosines and sines.
        truncate: whether the ramp's ends are rounded outwards to whole dimensions.
        score_factor: factor of the scores in DeepSeek's latent attention, which rotates only a part
            of a head.
    """

    factor: float
    original_positions: int
    beta_fast: float
    beta_slow: float
    attention_factor: float
    truncate: bool = True
    score_factor: float = 1.0


@dataclass(frozen=True, slots=True)
class LongRopeScaling:
    """LongRoPE (Ding et al. 2024, arXiv 2402.13753): a divisor for every rotated pair.

    Args:
        factors: the divisors in use.
        attention_factor: multiplies cosines and sines.
        short_factors: the divisors for sequences within the context of the pre-training.
        original_positions: context length of the pre-training.
    """

    factors: tuple[float, ...]
    attention_factor: float
    short_factors: tuple[float, ...]
    original_positions: int

    @property
    def is_short(self) -> bool:
        """Whether the divisors for short sequences are in use."""
        return self.factors == self.short_factors


RopeScaling: TypeAlias = LinearScaling | Llama3Scaling | YarnScaling | LongRopeScaling


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """The rotary embedding of a model.

    Args:
        theta: base of the frequencies.
        rotary_dim: number of leading elements of a head that are rotated.
        scaling: how it is extended beyond the context of the pre-training; None if it is not.
    """

    theta: float
    rotary_dim: int
    scaling: RopeScaling | None = None

    def for_length(self, longest: int) -> RopeConfig:
        """The embedding to use if no sequence is longer than ``longest`` tokens."""
        scaling = self.scaling
        if not isinstance(scaling, LongRopeScaling) or longest > scaling.original_positions:
            return self
        return replace(self, scaling=replace(scaling, factors=scaling.short_factors))


def inverse_frequencies(rope: RopeConfig) -> Tensor:
    """The angle per position of every rotated pair: ``[rotary_dim / 2]`` float32."""
    exponents = torch.arange(0, rope.rotary_dim, 2, dtype=torch.int64).float() / rope.rotary_dim
    base = 1.0 / (rope.theta**exponents)
    scaling = rope.scaling
    if isinstance(scaling, LinearScaling):
        return base / scaling.factor
    if isinstance(scaling, Llama3Scaling):
        return _llama3_frequencies(base, scaling)
    if isinstance(scaling, YarnScaling):
        return _yarn_frequencies(base, rope, scaling)
    if isinstance(scaling, LongRopeScaling):
        return 1.0 / (torch.tensor(scaling.factors) * rope.theta**exponents)
    return base


def cos_sin_table(rope: RopeConfig, num_positions: int) -> Tensor:
    """The cosines, then sines, of every position: ``[num_positions, rotary_dim]`` float32."""
    positions = torch.arange(num_positions, dtype=torch.float32)
    angles = torch.outer(positions, inverse_frequencies(rope))
    table = torch.cat((angles.cos(), angles.sin()), dim=-1)
    if isinstance(rope.scaling, YarnScaling | LongRopeScaling):
        table *= rope.scaling.attention_factor
    return table


def longrope_attention_factor(factor: float, original_positions: int) -> float:
    """The paper's ``sqrt(1 + ln(factor) / ln(original))``; 1 for factors up to 1."""
    if factor <= 1:
        return 1.0
    return math.sqrt(1 + math.log(factor) / math.log(original_positions))


def yarn_attention_factor(
    factor: float, mscale: float | None = None, mscale_all_dim: float | None = None
) -> float:
    """The paper's ``0.1 ln(factor) + 1``, or DeepSeek's ratio of two such terms."""
    if mscale and mscale_all_dim:
        return yarn_mscale(factor, mscale) / yarn_mscale(factor, mscale_all_dim)
    return yarn_mscale(factor, 1.0)


def yarn_mscale(factor: float, weight: float) -> float:
    """``0.1 weight ln(factor) + 1``; 1 for factors up to 1."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _llama3_frequencies(base: Tensor, scaling: Llama3Scaling) -> Tensor:
    wavelengths = 2 * math.pi / base
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    ramp = (scaling.original_positions / wavelengths - low) / (high - low)
    ramp = ramp.clamp(0.0, 1.0)
    return (1 - ramp) * base / scaling.factor + ramp * base


def _yarn_frequencies(base: Tensor, rope: RopeConfig, scaling: YarnScaling) -> Tensor:
    low = _yarn_dimension(rope, scaling, scaling.beta_fast)
    high = _yarn_dimension(rope, scaling, scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    pairs = torch.arange(rope.rotary_dim // 2, dtype=torch.float32)
    width = high - low or 0.001  # equal ends would divide by zero
    interpolated = ((pairs - low) / width).clamp(0.0, 1.0)
    return base / scaling.factor * interpolated + base * (1 - interpolated)


def _yarn_dimension(rope: RopeConfig, scaling: YarnScaling, rotations: float) -> float:
    """The dimension that rotates ``rotations`` times over the original context."""
    turns = scaling.original_positions / (rotations * 2 * math.pi)
    return rope.rotary_dim * math.log(turns) / (2 * math.log(rope.theta))
