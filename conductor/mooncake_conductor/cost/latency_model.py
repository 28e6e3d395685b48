"""The latency model of an instance: seconds per prefill and decode step, with initial estimates.

Before an instance is measured (`online_fit.py`), its coefficients come from the tables here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from mooncake_conductor.errors import ConductorConfigError

Row = TypeVar("Row")


@dataclass(frozen=True, slots=True)
class LatencyModel:
    """Latencies of one instance, in seconds.

    The prefill of a prompt of n tokens, p of them reused, takes
    ``fixed + per_token·(n − p) + per_token_squared·(n² − p²)``. A decode step of b sequences with c
    tokens of context in total takes
    ``step + step_per_sequence·(b − 1) + step_per_context_token·c``.

    All coefficients are at least 0, so that more work never takes less time.
    """

    fixed: float
    per_token: float
    per_token_squared: float
    step: float
    step_per_sequence: float
    step_per_context_token: float

    def __post_init__(self) -> None:
        if min(self.prefill_coefficients + self.step_coefficients) < 0:
            raise ConductorConfigError(f"costs in seconds must be at least 0, found {self}")

    @property
    def prefill_coefficients(self) -> tuple[float, float, float]:
        """Coefficients of 1, n − p and n² − p²."""
        return self.fixed, self.per_token, self.per_token_squared

    @property
    def step_coefficients(self) -> tuple[float, float, float]:
        """Coefficients of 1, b − 1 and the tokens of context."""
        return self.step, self.step_per_sequence, self.step_per_context_token

    def prefill_seconds(self, num_tokens: float, num_reused: float) -> float:
        """Seconds of one prefill without queueing."""
        computed = num_tokens - num_reused
        pairs = num_tokens * num_tokens - num_reused * num_reused
        return self.fixed + self.per_token * computed + self.per_token_squared * pairs

    def step_seconds(self, num_sequences: float, num_context_tokens: float) -> float:
        """Seconds of one decode step."""
        others = max(num_sequences - 1, 0)
        context = self.step_per_context_token * num_context_tokens
        return self.step + self.step_per_sequence * others + context


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The properties of a model that determine its costs.

    Args:
        num_layers: number of transformer layers.
        num_heads: number of query heads.
        head_dims: key width plus value width of one head.
        active_parameters: parameters used per token.
        kv_bytes_per_token: KV bytes per token of all layers.
    """

    num_layers: int
    num_heads: int
    head_dims: int
    active_parameters: float
    kv_bytes_per_token: int


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator, or one CPU socket.

    Args:
        tflops: peak of dense bfloat16, in TFLOPS.
        linear_share: share of the peak that matrix products reach.
        attention_share: share of the peak that attention reaches.
        memory_gb_s: bandwidth of its memory, in GB/s.
        host_gb_s: bandwidth from host memory, in GB/s.
    """

    tflops: float
    linear_share: float
    attention_share: float
    memory_gb_s: float
    host_gb_s: float


DEVICES = {
    # Shares of the peak: from Vidur's measured kernels for A100 and H100; assumed for the others.
    "A100": Device(312, 0.66, 0.40, 2039, 25),
    "A800": Device(312, 0.66, 0.40, 2039, 25),
    "H100": Device(989, 0.60, 0.36, 3350, 50),
    "H800": Device(989, 0.60, 0.36, 3350, 50),
    "H200": Device(989, 0.60, 0.36, 4800, 50),
    "910B": Device(320, 0.55, 0.33, 1600, 25),
    "910C": Device(752, 0.55, 0.33, 3200, 25),
    "CPU": Device(1.5, 0.50, 0.30, 200, 100),
}

MODELS = {
    "llama-3-70b": ModelShape(80, 64, 256, 70.6e9, 327_680),
    "llama-3-8b": ModelShape(32, 32, 256, 8.0e9, 131_072),
    "qwen3-32b": ModelShape(64, 64, 256, 32.8e9, 262_144),
    "deepseek-v3": ModelShape(61, 128, 320, 37.0e9, 70_272),
}

MEASURED = {
    # LLaMA3-70B on 8×A800: prefill fitted to Mooncake's measurements (FAST'25, figure 14), at most
    # 8 % off; decode from the same figure and the batch sizes of arXiv 2407.00079, figure 2.
    ("llama-3-70b", "A800", 8): LatencyModel(0.1041, 0.10208e-3, 9.405e-10, 0.0265, 0.18e-3, 3.1e-8)
}

_MEMORY_SHARE = 0.7
"""Share of the memory bandwidth that decoding reaches."""
_PREFILL_FIXED_S, _STEP_PER_SEQUENCE_S = 0.02, 0.1e-3


def cold_start(model: str, device: str, num_devices: int) -> LatencyModel:
    """Initial latencies before any measurement: from published figures, else from device peaks.

    Raises:
        ConductorConfigError: the model or device is unknown, or there is no device; the error lists
            the known ones.
    """
    if num_devices < 1:
        raise ConductorConfigError(f"{num_devices} devices: an instance has 1 or more")
    measured = MEASURED.get((model, device, num_devices))
    if measured is not None:
        return measured
    shape = find(MODELS, model, "model")
    chip = find(DEVICES, device, "device")
    return estimate(shape, chip, num_devices)


def estimate(shape: ModelShape, chip: Device, num_devices: int) -> LatencyModel:
    """Estimate latencies from a model's shape and a device's peaks."""
    flops = num_devices * chip.tflops * 1e12
    memory = num_devices * chip.memory_gb_s * 1e9 * _MEMORY_SHARE
    return LatencyModel(
        _PREFILL_FIXED_S,
        2 * shape.active_parameters / (flops * chip.linear_share),
        shape.num_layers * shape.num_heads * shape.head_dims / (flops * chip.attention_share),
        2 * shape.active_parameters / memory,
        _STEP_PER_SEQUENCE_S,
        shape.kv_bytes_per_token / memory,
    )


def find(table: Mapping[str, Row], name: str, kind: str) -> Row:
    """The row with this name.

    Raises:
        ConductorConfigError: there is none; the error lists the known names.
    """
    row = table.get(name)
    if row is None:
        raise ConductorConfigError(f"no {kind} {name!r}: there are {', '.join(table)}")
    return row
