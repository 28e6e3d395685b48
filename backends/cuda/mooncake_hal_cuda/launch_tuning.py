"""Launch parameters of the kernels per GPU generation: the only module where generations differ.

Tiles are as large as registers and shared memory allow without spilling. The compile tests
(``make test-cuda-compile``) check this for every tile.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

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
"""Shared memory available to one program, per generation, in bytes (CUDA C Programming Guide)."""

_LARGE_SHARED_BYTES = 160_000
_MIN_PROGRAMS = 8
_MIN_PROGRAMS_ON_FULL_DEVICE = 2
"""Used where the rows of all sequences fill the device without splits: for contexts of usual length
further programs would find no split to compute, and would only cost their launch."""
_MIN_SPLITS_ON_FULL_DEVICE = 8
"""Splits that one program computes at least on a full device. The splits of a long context in such
a batch are still divided among several programs."""
_OVERLAPPED_STAGES = 5
"""Pipeline stages that Triton needs to overlap the load of a tile with the computation on the one
before it, if the addresses are loaded too (from the block table): the loads of addresses take two
stages, and with fewer than five stages the tile has a single buffer."""

MAX_REGISTERS = 255
"""Registers per thread that the hardware can address."""

NEIGHBOURS = 8
"""Row tiles of a matrix product that are scheduled next to each other, to share weights in L2."""

WIDTH = 1024
"""Elements per program of the elementwise kernels."""


@dataclass(frozen=True, slots=True)
class AttentionTile:
    """Launch parameters of an attention kernel.

    Args:
        rows: query rows per program.
        tokens: KV tokens per iteration of a program's loop.
        warps, stages: warps and pipeline stages per program.
        registers: upper limit of registers per thread; None: the assembler chooses. Left to choose,
            it spills a few registers to fit another program on the processor, even if shared memory
            has no space for that program.
        full: with more programs than this per processor, without splits, the device is full.
    """

    rows: int
    tokens: int
    warps: int
    stages: int
    registers: int | None = None
    full: float = 4


_EXACT = AttentionTile(32, 32, 8, 1, MAX_REGISTERS)
"""For float32, which is multiplied without matrix units: for correctness checks, not for speed."""


@dataclass(frozen=True, slots=True)
class MatmulTile:
    """Launch parameters of a grouped matrix product: output tile (rows, columns), depth per
    iteration, warps and stages per program."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class Splitting:
    """How a decode's context is divided: no split is shorter than ``min_tokens``, and there are at
    most ``max_splits`` splits."""

    min_tokens: int
    max_splits: int

    def count(self, capacity: int) -> int:
        """The number of splits that a launch needs for contexts of up to ``capacity`` tokens."""
        return max(1, min(self.max_splits, -(-capacity // self.min_tokens)))


@dataclass(frozen=True, slots=True)
class Tuning:
    """Launch parameters for one device.

    Args:
        generation: the device's generation, such as ``"sm_90"``.
        processors: number of streaming multiprocessors.

    Raises:
        CapabilityError: there are no launch parameters for the generation.
    """

    generation: str
    processors: int

    def __post_init__(self) -> None:
        if self.generation not in SHARED_BYTES:
            raise CapabilityError(f"there are no launch parameters for {self.generation}")

    @property
    def kv_dtypes(self) -> tuple[str, ...]:
        """KV cache types narrower than the activations: hardware converts e4m3 from sm_89 on."""
        return () if self.generation in ("sm_80", "sm_86") else ("float8_e4m3fn",)

    @property
    def quantization(self) -> tuple[str, ...]:
        """Quantised weights that are multiplied without conversion: matrix units accept e4m3 from
        sm_89 on."""
        return () if self.generation in ("sm_80", "sm_86") else ("fp8", "fp8_experts")

    @property
    def _has_large_shared(self) -> bool:
        return SHARED_BYTES[self.generation] >= _LARGE_SHARED_BYTES

    @property
    def _is_wide(self) -> bool:
        """Whether four warps share one matrix product, with its operands in shared memory."""
        return self.generation in ("sm_90", "sm_100", "sm_103")

    def decode(self, group: int, dim: int, element_bytes: int, kv_bytes: int) -> AttentionTile:
        """Tile of grouped-head attention with one new token per sequence, bound by KV reads.

        On sm_90, programs of a single warp, which never wait for other warps, and of so few tokens
        that a processor runs nine of them at once: on an H200, 128 contexts of 528 tokens took 78
        us (e4m3: 66), and 87 us (102) with more tokens and warps. A single stream's are slower: one
        of 8,192 tokens took 25 us (29) instead of 23 (22), one of 528 tokens the same in 16 bits
        and 20 us instead of 13 in e4m3. Groups of more than eight heads have large merges, for
        which one warp is too slow.
        """
        if element_bytes == 4:
            return replace(_EXACT, rows=16)  # a merge in registers leaves none for more rows
        rows = max(16, power_of_two(group))
        if self.generation == "sm_90" and group <= 8 and dim <= 128:
            tokens, full = 32 if dim <= 64 else 16, 2.5 if kv_bytes == element_bytes else 4
            return AttentionTile(rows, tokens, 1, _OVERLAPPED_STAGES, MAX_REGISTERS, full)
        tokens = 128 if dim <= 64 else 64 if dim <= 128 else 32
        # larger tiles make the assembler for sm_100 spill registers rather than wait for loads
        if self._is_wide and (self.generation != "sm_90" or kv_bytes == element_bytes):
            tokens = max(32, tokens // 2)
        stages = _OVERLAPPED_STAGES if self._has_large_shared else 2
        registers = 128 if rows == 16 and dim <= 128 else 168 if rows <= 32 else MAX_REGISTERS
        if kv_bytes < element_bytes:  # widening it takes registers
            return AttentionTile(rows, min(tokens, 64), 8, stages, registers)
        return AttentionTile(rows, tokens, 4, stages, registers)

    def prefill(self, dim: int, element_bytes: int, kv_bytes: int) -> AttentionTile:
        """Tile of grouped-head attention over many new tokens, bound by matrix products."""
        if element_bytes == 4:
            return _EXACT
        stages, registers = 3, None
        if self._has_large_shared and (kv_bytes < element_bytes or not self._is_wide):
            stages = _OVERLAPPED_STAGES
            if dim <= 64 and self.generation == "sm_100":
                registers = MAX_REGISTERS  # Triton 3.5's assembler would spill at 128
        elif dim <= 64 and self.generation in ("sm_100", "sm_103"):
            stages = 2  # with products in tensor memory and narrow heads, a third stage spills
        tokens = 64 if self._is_wide and dim <= 128 else 32
        return AttentionTile(128, tokens, 8, stages, registers)

    def latent(self, rows: int, element_bytes: int, kv_bytes: int) -> AttentionTile:
        """Tile of attention over latents; ``rows`` is heads times new tokens.

        64 rows are the minimum of the four-warp products and the maximum that registers can hold:
        each group of four warps has half of the sums, as in DeepSeek's FlashMLA. With 128 heads,
        every latent is read twice, the second time from L2. Narrower KV allows fewer rows.
        """
        if element_bytes == 4:
            return AttentionTile(16, 16, 8, 1, MAX_REGISTERS)
        if kv_bytes < element_bytes:
            return AttentionTile(16, 32, 8, _OVERLAPPED_STAGES)
        if self._is_wide and rows >= 64:
            return AttentionTile(64, 64 if self.generation == "sm_90" else 32, 8, 2)
        height = max(16, min(32, power_of_two(rows)))
        fits = self._has_large_shared or height == 16
        # shared memory holds two programs of 16 rows there, so registers must hold two as well
        warps = 4 if self._is_wide and height == 16 else 8
        return AttentionTile(height, 32, warps, _OVERLAPPED_STAGES if fits else 2)

    def matmul(self, rows: int, element_bytes: int) -> MatmulTile:
        """Tile of the experts' matrix products; ``rows`` is the mean number of rows per expert."""
        if element_bytes == 4:
            return MatmulTile(16, 64, 32, 4, 1)
        height = max(16, min(128, power_of_two(rows)))
        if height <= 32:
            return MatmulTile(height, 128, 64, 4, 4 if self._has_large_shared else 3)
        return MatmulTile(height, 128, 64, 8, 3)

    def fp8_matmul(self, rows: int) -> MatmulTile:
        """Tile of e4m3 products with block scales; one iteration is as deep as a block."""
        height = max(16, min(128 if self._is_wide else 64, power_of_two(rows)))
        if height <= 32:
            return MatmulTile(height, 64, FP8_BLOCK, 4, 5 if self._has_large_shared else 4)
        return MatmulTile(height, 128, FP8_BLOCK, 8, 4 if self._has_large_shared else 3)

    @property
    def has_early_launches(self) -> bool:
        """Whether kernels use programmatic dependent launch: a kernel starts before the previous
        one has finished, and waits for it itself. The hardware has it from sm_90 on; it is used on
        sm_90 only, where it was measured."""
        return self.generation == "sm_90"

    def early_launch(self, rows: int) -> dict[str, bool]:
        """Launch options of the kernels that call ``await_predecessor``; ``rows`` are a step's.

        On an H200, early launches saved 1 us of a layer of 123 us with one row. With 32 rows and
        more the kernels themselves take longer, and nothing was saved.
        """
        return {"launch_pdl": True} if self.has_early_launches and rows == 1 else {}

    @property
    def sampled_groups(self) -> int:
        """Groups of logits that sampling processes at once: as many as 16 warps keep in
        registers."""
        return 128 if self._is_wide else 64

    def splitting(self, programs: int, min_tokens: int) -> Splitting:
        """Divide a context into enough splits for a single sequence to fill the device.

        Args:
            programs: number of programs of one sequence without splits.
            min_tokens: shortest split; merging a shorter one costs more than it saves.
        """
        return Splitting(min_tokens, min(256, power_of_two(2 * self.processors // programs or 1)))

    def programs(self, splits: int, others: int, tile: AttentionTile) -> int:
        """The number of programs that share the splits of one sequence's rows.

        A launch is sized for the longest possible context. With one program per split, most
        programs of a large batch of short contexts would be idle.

        Args:
            splits: number of splits of the longest context.
            others: number of programs in the launch without splits.
            tile: of one program.
        """
        is_full = self._is_full(others, tile)
        min_programs = _MIN_PROGRAMS_ON_FULL_DEVICE if is_full else _MIN_PROGRAMS
        wanted = power_of_two(4 * self.processors // others or 1)
        return min(splits, max(min_programs, wanted))

    def min_splits(self, others: int, tile: AttentionTile) -> int:
        """The minimum number of splits per program; arguments as for ``programs``."""
        return _MIN_SPLITS_ON_FULL_DEVICE if self._is_full(others, tile) else 1

    def _is_full(self, others: int, tile: AttentionTile) -> bool:
        return others > tile.full * self.processors


def tuned_generation(generation: str) -> str:
    """The generation whose launch parameters a device gets: its own, or the next older one of its
    family, such as sm_120 for sm_121.

    Raises:
        CapabilityError: the device is older than the kernels support, or its family is unknown.
    """
    known = sorted(SHARED_BYTES, key=_number)
    if _number(generation) < _number(known[0]):
        raise CapabilityError(f"it is {generation}; bfloat16 needs {known[0]} or newer")
    family, number = _number(generation) // 10, _number(generation)
    older = [name for name in known if _number(name) // 10 == family and _number(name) <= number]
    if not older:
        raise CapabilityError(
            f"it is {generation}, for which this version of the cuda backend has no launch "
            f"parameters; it has them for {known}"
        )
    return older[-1]


def _number(generation: str) -> int:
    return int(generation.removeprefix("sm_"))


def power_of_two(value: int) -> int:
    """The smallest power of two that is at least ``value``."""
    return 1 << max(0, value - 1).bit_length()
