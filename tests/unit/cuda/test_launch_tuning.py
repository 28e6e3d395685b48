"""Launch tuning: tile sizes per GPU generation, and split counts per sequence length."""

from __future__ import annotations

import pytest

from mooncake_hal.errors import CapabilityError
from mooncake_hal_cuda.launch_tuning import (
    SHARED_BYTES,
    Splitting,
    Tuning,
    power_of_two,
    tuned_generation,
)


@pytest.mark.parametrize(
    ("generation", "reason"),
    [
        ("sm_75", "it is sm_75; bfloat16 needs sm_80 or newer"),
        ("sm_61", "it is sm_61; bfloat16 needs sm_80 or newer"),
        ("sm_110", "it is sm_110, for which this version of the cuda backend has no launch"),
        ("sm_130", "it is sm_130, for which this version of the cuda backend has no launch"),
    ],
)
def test_unknown_generation_is_rejected(generation: str, reason: str) -> None:
    with pytest.raises(CapabilityError, match=reason):
        tuned_generation(generation)
    with pytest.raises(CapabilityError, match=f"no launch parameters for {generation}"):
        Tuning(generation, 40)


@pytest.mark.parametrize("generation", SHARED_BYTES)
def test_known_generation_has_its_own_parameters(generation: str) -> None:
    assert tuned_generation(generation) == generation


@pytest.mark.parametrize(
    ("generation", "tuned"), [("sm_121", "sm_120"), ("sm_87", "sm_86"), ("sm_101", "sm_100")]
)
def test_other_generations_have_those_of_their_family(generation: str, tuned: str) -> None:
    assert tuned_generation(generation) == tuned


@pytest.mark.parametrize("generation", SHARED_BYTES)
@pytest.mark.parametrize("element_bytes", [2, 4])
def test_tiles_are_powers_of_two(generation: str, element_bytes: int) -> None:
    tuning = Tuning(generation, 100)
    tiles = [tuning.decode(group, 128, element_bytes, 2) for group in (1, 4, 7, 16)]
    tiles += [tuning.prefill(dim, element_bytes, 2) for dim in (64, 128, 256)]
    tiles += [tuning.latent(rows, element_bytes, 1) for rows in (1, 16, 128)]
    for tile in tiles:
        assert tile.rows == power_of_two(tile.rows) >= 16
        assert tile.tokens == power_of_two(tile.tokens) >= 16


@pytest.mark.parametrize(
    ("generation", "kv_bytes", "tokens"),
    [("sm_80", 2, 64), ("sm_90", 2, 16), ("sm_90", 1, 16), ("sm_100", 2, 32), ("sm_100", 1, 32)],
)
def test_decode_tile_tokens_per_generation(generation: str, kv_bytes: int, tokens: int) -> None:
    """Fewer tokens where that was measured to be faster, or where more would spill registers."""
    assert Tuning(generation, 132).decode(4, 128, 2, kv_bytes).tokens == tokens


@pytest.mark.parametrize(
    ("generation", "dim", "kv_bytes", "registers"),
    [
        ("sm_100", 64, 1, 255),
        ("sm_100", 64, 2, None),
        ("sm_100", 128, 1, None),
        ("sm_90", 64, 1, None),
    ],
)
def test_prefill_tile_register_limit(
    generation: str, dim: int, kv_bytes: int, registers: int | None
) -> None:
    """Left to the assembler, except where the one of Triton 3.5 would spill."""
    assert Tuning(generation, 148).prefill(dim, 2, kv_bytes).registers == registers


@pytest.mark.parametrize(
    ("capacity", "splits"), [(1, 1), (256, 1), (257, 2), (4096, 16), (10**6, 64)]
)
def test_split_count_follows_from_the_capacity(capacity: int, splits: int) -> None:
    assert Splitting(256, 64).count(capacity) == splits


def test_single_sequence_fills_the_device() -> None:
    assert Tuning("sm_90", 132).splitting(8, 256).max_splits >= 2 * 132 // 8
    assert Tuning("sm_90", 132).splitting(1000, 256).max_splits == 1


@pytest.mark.parametrize("generation", SHARED_BYTES)
def test_e4m3_kv_needs_a_generation_that_converts_it(generation: str) -> None:
    has_it = Tuning(generation, 100).kv_dtypes == ("float8_e4m3fn",)
    assert has_it == (generation not in ("sm_80", "sm_86"))


def test_latent_tiles_grow_with_the_number_of_heads() -> None:
    hopper, ampere = Tuning("sm_90", 132), Tuning("sm_80", 108)
    assert hopper.latent(128, 2, 2).rows == hopper.latent(64, 2, 2).rows == 64
    assert hopper.latent(16, 2, 2).rows == 16
    assert ampere.latent(128, 2, 2).rows == 32


@pytest.mark.parametrize(
    ("splits", "others", "kv_bytes", "programs"),
    [
        (64, 8, 2, 64),
        (64, 256, 2, 8),
        (64, 384, 2, 2),
        (64, 512, 1, 8),
        (64, 2048, 2, 2),
        (4, 2048, 2, 2),
    ],
)
def test_large_batches_have_few_programs_per_sequence(
    splits: int, others: int, kv_bytes: int, programs: int
) -> None:
    """With short contexts, most of any further programs would be idle."""
    tuning = Tuning("sm_90", 132)
    tile = tuning.decode(4, 128, 2, kv_bytes)
    assert tuning.programs(splits, others, tile) == programs
    assert tuning.min_splits(others, tile) == (8 if programs == 2 else 1)


@pytest.mark.parametrize(
    ("generation", "rows", "is_early"),
    [("sm_90", 1, True), ("sm_90", 2, False), ("sm_100", 1, False)],
)
def test_early_launches_of_single_rows(generation: str, rows: int, is_early: bool) -> None:
    """Where they were measured to save time."""
    assert bool(Tuning(generation, 132).early_launch(rows)) == is_early
