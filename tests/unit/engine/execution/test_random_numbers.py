from __future__ import annotations

from hypothesis import given, strategies as st

from mooncake_engine.execution.sampling_metadata import uniform, uniforms


@given(st.integers(-(2**63), 2**64 - 1), st.integers(0, 2**31))
def test_uniform_is_a_repeatable_fraction_below_one(seed: int, position: int) -> None:
    number = uniform(seed, position)
    assert 0.0 <= number < 1.0
    assert uniform(seed, position) == number


def test_uniform_is_splitmix64_with_a_scrambled_seed() -> None:
    # the published first outputs of SplitMix64 from state 0, which scrambling leaves at 0
    published = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4]
    assert [uniform(0, position) for position in (0, 1)] == [
        (output >> 12) / 2**52 for output in published
    ]
    assert uniform(-1, 5) == uniform(2**64 - 1, 5)


def test_positions_and_neighbouring_seeds_are_spread_evenly() -> None:
    draws = [uniform(seed, position) for seed in range(100) for position in range(100)]
    buckets = [0] * 20
    for draw in draws:
        buckets[int(draw * 20)] += 1
    # 500 expected each; 5 sigma is 109
    assert all(391 < count < 609 for count in buckets)
    assert len(set(draws)) == len(draws)


def test_uniforms_equals_uniform_element_wise() -> None:
    seeds = [0, 1, -1, 2**63, 2**64 + 5, 123456789]
    positions = [0, 7, 5, 2**31, 3, 100_000]
    wanted = [uniform(seed, position) for seed, position in zip(seeds, positions, strict=True)]
    assert uniforms(seeds, positions).tolist() == wanted
