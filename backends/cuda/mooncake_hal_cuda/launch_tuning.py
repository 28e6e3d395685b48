"""How kernels are launched on each generation: the one place where generations differ.

Tiles are as large as registers and shared memory allow without spilling; the compile proof
(``make test-cuda-compile``) holds every one of them to that.
"""

from __future__ import annotations

from dataclasses import dataclass

from mooncake_hal.errors import CapabilityError
from mooncake_hal.fp8_linear import FP8_BLOCK

SHARED_BYTES = {
    "sm_80": 166_912,
    "sm_86": 101_376,
    "sm_89": 101_376,
    "sm_90": 232_448,
    "sm_100": 232_448,
    "sm_103": 232_448,
    "sm_120": 101_376,
}
"""Shared memory that one program may have, per generation (CUDA C Programming Guide)."""

_ROOMY_BYTES = 160_000
_LEAST_PROGRAMS = 8
_LEAST_OF_MANY = 2
"""Where the others fill the device alone: more would find nothing to do in contexts of usual
length, and cost their launch."""
_LEAST_SPLITS_OF_MANY = 8
"""That a program takes there: on an H200, 128 contexts of three splits took 92 us where one program
had all of each, and 103 where two shared them. A long context among them is shared as before."""
_OVERLAPPED = 5
"""Stages with which Triton loads a tile while the one before it is worked on, where the addresses
are loaded too (from the block table): those take two, and with less there is one buffer."""

MOST_REGISTERS = 255
"""Of a thread."""

NEIGHBOURS = 8
"""Tiles of rows of a matrix product that run beside each other and share weights in the cache."""

WIDTH = 1024
"""Elements per program of the kernels that work element by element."""


@dataclass(frozen=True, slots=True)
class AttentionTile:
    """How an attention kernel is launched.

    Args:
        rows: query rows per program.
        tokens: KV tokens per step.
        warps, stages: per program.
        registers: per thread at most; None: the assembler's choice. It spills a few to make room
            for another program, even where shared memory has none for it.
    """

    rows: int
    tokens: int
    warps: int
    stages: int
    registers: int | None = None


_EXACT = AttentionTile(32, 32, 8, 1, MOST_REGISTERS)
"""For float32, whose products are made without matrix units; for checks, not for speed."""


@dataclass(frozen=True, slots=True)
class MatmulTile:
    """How the grouped matrix product is launched: output tile, depth per step, warps, stages."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class Splitting:
    """How a decode's context is cut: no split below ``min_tokens``, no more than ``most``."""

    min_tokens: int
    most: int

    def count(self, capacity: int) -> int:
        """Splits that a launch needs for contexts of up to ``capacity`` tokens."""
        return max(1, min(self.most, -(-capacity // self.min_tokens)))


@dataclass(frozen=True, slots=True)
class Tuning:
    """Launch parameters for one device.

    Args:
        generation: such as ``"sm_90"``.
        processors: streaming multiprocessors.

    Raises:
        CapabilityError: the generation is unknown, or older than the kernels can be.
    """

    generation: str
    processors: int

    def __post_init__(self) -> None:
        if self.generation not in SHARED_BYTES:
            raise CapabilityError(
                f"the cuda backend has launch parameters for {sorted(SHARED_BYTES)}, this device "
                f"is {self.generation}; bfloat16 needs sm_80 or newer"
            )

    @property
    def kv_dtypes(self) -> tuple[str, ...]:
        """Narrower types that KV may be kept in: e4m3 is converted from sm_89 on."""
        return () if self.generation in ("sm_80", "sm_86") else ("float8_e4m3fn",)

    @property
    def quantization(self) -> tuple[str, ...]:
        """Quantised weights that are multiplied as they are: matrix units take e4m3 from sm_89
        on."""
        return () if self.generation in ("sm_80", "sm_86") else ("fp8", "fp8_experts")

    @property
    def _is_roomy(self) -> bool:
        return SHARED_BYTES[self.generation] >= _ROOMY_BYTES

    @property
    def _is_wide(self) -> bool:
        """Whether four warps share a matrix product, its operands in shared memory."""
        return self.generation in ("sm_90", "sm_100", "sm_103")

    def decode(self, group: int, dim: int, element_bytes: int, kv_bytes: int) -> AttentionTile:
        """For grouped heads with one new token per sequence: reading KV is all that matters.

        KV of a narrower type takes registers to widen, hence more warps.
        """
        if element_bytes == 4:
            return _EXACT
        tokens = 128 if dim <= 64 else 64 if dim <= 128 else 32
        # an H200 has twice as many programs under way with smaller tiles: 92 us for 107; the
        # assembler for sm_100 spills registers with larger ones rather than wait for loads
        if self._is_wide and (self.generation != "sm_90" or kv_bytes == element_bytes):
            tokens = max(32, tokens // 2)
        rows, stages = max(16, power_of_two(group)), _OVERLAPPED if self._is_roomy else 2
        registers = 128 if rows == 16 and dim <= 128 else 168 if rows <= 32 else MOST_REGISTERS
        if kv_bytes < element_bytes:
            return AttentionTile(rows, min(tokens, 64), 8, stages, registers)
        return AttentionTile(rows, tokens, 4, stages, registers)

    def prefill(self, dim: int, element_bytes: int, kv_bytes: int) -> AttentionTile:
        """For grouped heads over many new tokens: matrix products are all that matters."""
        if element_bytes == 4:
            return _EXACT
        stages = 3
        if self._is_roomy and (kv_bytes < element_bytes or not self._is_wide):
            stages = _OVERLAPPED
        elif dim <= 64 and self.generation in ("sm_100", "sm_103"):
            stages = 2  # with products in tensor memory and narrow heads, a third one spills
        return AttentionTile(128, 64 if self._is_wide and dim <= 128 else 32, 8, stages)

    def latent(self, rows: int, element_bytes: int, kv_bytes: int) -> AttentionTile:
        """For latents; ``rows`` is heads times new tokens, of which narrower KV allows fewer.

        64 rows are what the wide products begin at, and all that registers hold: half of the sums
        per four warps, as in DeepSeek's FlashMLA. 128 heads read every latent twice, once from L2.
        """
        if element_bytes == 4:
            return AttentionTile(16, 16, 8, 1, MOST_REGISTERS)
        if kv_bytes < element_bytes:
            return AttentionTile(16, 32, 8, _OVERLAPPED)
        if self._is_wide and rows >= 64:
            return AttentionTile(64, 64 if self.generation == "sm_90" else 32, 8, 2)
        height = max(16, min(32, power_of_two(rows)))
        fits = self._is_roomy or height == 16
        # shared memory holds two programs of 16 rows there, so registers must, too
        warps = 4 if self._is_wide and height == 16 else 8
        return AttentionTile(height, 32, warps, _OVERLAPPED if fits else 2)

    def matmul(self, rows: int, element_bytes: int) -> MatmulTile:
        """For experts; ``rows`` is how many an expert has on average."""
        if element_bytes == 4:
            return MatmulTile(16, 64, 32, 4, 1)
        height = max(16, min(128, power_of_two(rows)))
        if height <= 32:
            return MatmulTile(height, 128, 64, 4, 4 if self._is_roomy else 3)
        return MatmulTile(height, 128, 64, 8, 3)

    def fp8_matmul(self, rows: int) -> MatmulTile:
        """For e4m3 with scales of blocks, which are as deep as a step."""
        height = max(16, min(128 if self._is_wide else 64, power_of_two(rows)))
        if height <= 32:
            return MatmulTile(height, 64, FP8_BLOCK, 4, 5 if self._is_roomy else 4)
        return MatmulTile(height, 128, FP8_BLOCK, 8, 4 if self._is_roomy else 3)

    @property
    def has_early_launches(self) -> bool:
        """Whether a kernel may be launched before the one in front of it is done, and waits for
        that itself (from sm_90 on; measured there)."""
        return self.generation == "sm_90"

    @property
    def sampled_groups(self) -> int:
        """Groups of logits that sampling looks at at once: what 16 warps keep in registers."""
        return 128 if self._is_wide else 64

    def splitting(self, programs: int, min_tokens: int) -> Splitting:
        """Cut so that one sequence alone fills the device.

        Args:
            programs: that one sequence has without splits.
            min_tokens: below which a split costs more to merge than it saves.
        """
        return Splitting(min_tokens, min(256, power_of_two(2 * self.processors // programs or 1)))

    def programs(self, splits: int, others: int) -> int:
        """How many programs share the splits of one sequence's rows.

        A launch has room for the longest context there may be: a program per split would leave a
        large batch of short ones with little but programs that have nothing to do.

        Args:
            splits: of the longest context.
            others: programs that there would be without splits.
        """
        least = _LEAST_OF_MANY if self._is_full(others) else _LEAST_PROGRAMS
        return min(splits, max(least, power_of_two(self._room // others or 1)))

    def least_splits(self, others: int) -> int:
        """How many splits a program takes at the least, with as many others as above."""
        return _LEAST_SPLITS_OF_MANY if self._is_full(others) else 1

    @property
    def _room(self) -> int:
        return 4 * self.processors

    def _is_full(self, others: int) -> bool:
        return others > self._room


def power_of_two(value: int) -> int:
    """The smallest power of two that is not below ``value``."""
    return 1 << max(0, value - 1).bit_length()
