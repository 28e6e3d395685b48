"""Load, recompute, or some of both, by measured seconds."""

import pytest

from mooncake_kv.pool.least_squares import FadingLeastSquares
from mooncake_kv.pool.pool_costs import (
    LoadCosts,
    PrefillCosts,
    PromptToLoad,
    choose_load,
    layers_before_release,
)

LAYERS = 32


def measured(token_s=1e-4, byte_s=1e-9, latency_s=1e-3):
    prefill, loads = PrefillCosts(), LoadCosts()
    for num_tokens in (64, 256, 1024, 2048):
        attended = num_tokens**2 / 2
        prefill.learn(num_tokens, attended, 1e-3 + token_s * num_tokens + 1e-9 * attended, 0.0)
    for nbytes in (1 << 20, 1 << 24, 1 << 28):
        loads.learn("store", nbytes, latency_s + byte_s * nbytes, 0.0)
    return prefill, loads


def prompt(num_tokens=4096, num_cached=0, num_found=15, chunk_bytes=1 << 20):
    return PromptToLoad(num_tokens, num_cached, 256, chunk_bytes, ["store"] * num_found, LAYERS)


def test_estimates_match_measured_costs():
    prefill, loads = measured()
    assert prefill.seconds(0, 512, 0.0) == pytest.approx(1e-3 + 0.0512 + 1e-9 * 512**2 / 2, rel=0.1)
    assert loads.seconds("store", 1 << 26, 0.0) == pytest.approx(1e-3 + 0.067, rel=0.1)


def test_fast_link_loads_everything_and_slow_link_nothing():
    assert choose_load(prompt(), *measured(), 0.0).num_chunks == 15
    assert choose_load(prompt(), *measured(byte_s=1e-5), 0.0).num_chunks == 0
    assert choose_load(prompt(), *measured(byte_s=1e-5), 0.0, is_always=True).num_chunks == 15


def test_medium_link_loads_a_part_while_the_rest_is_computed():
    """Loading a chunk takes half as long as computing it: two thirds are loaded."""
    choice = choose_load(prompt(), *measured(byte_s=0.0125e-6), 0.0)
    assert 8 <= choice.num_chunks <= 12
    assert choice.total_s == pytest.approx(max(choice.load_s, choice.compute_s), rel=0.1)


def test_more_cached_chunks_never_cost_more_time():
    costs = measured(byte_s=0.0125e-6)
    totals = [choose_load(prompt(num_found=n), *costs, 0.0).total_s for n in range(16)]
    assert totals == sorted(totals, reverse=True)


def test_slower_link_never_loads_more():
    chosen = [
        choose_load(prompt(), *measured(byte_s=byte_s), 0.0).num_chunks
        for byte_s in (1e-10, 1e-9, 1e-8, 3e-8, 1e-7, 1e-6)
    ]
    assert chosen == sorted(chosen, reverse=True)


def test_chunks_on_the_device_are_neither_loaded_nor_counted():
    choice = choose_load(prompt(num_cached=14 * 256 + 128), *measured(), 0.0)
    assert choice.num_chunks in (14, 15)
    assert choice.load_s < 2e-3


def test_everything_is_loaded_without_measurements():
    _, loads = measured(byte_s=1e-5)
    assert choose_load(prompt(), PrefillCosts(), loads, 0.0).num_chunks == 15


def test_slow_measurement_expires():
    _, loads = measured(byte_s=1e-5)
    assert loads.seconds("store", 1 << 28, 0.0) > 1000
    assert loads.seconds("store", 1 << 28, 3600.0) < 1.0


def slow_and_late(loads, began, seconds=500.0):
    """A load of the prompt timed out after ten seconds; it would have taken longer."""
    loads.learn_late("store", 15 << 20, seconds, began, began + 10.0)


def test_slower_store_than_estimated_delays_one_prompt():
    prefill, _ = measured()
    loads = LoadCosts()
    assert choose_load(prompt(), prefill, loads, 0.0).num_chunks == 15
    slow_and_late(loads, 0.0)
    assert choose_load(prompt(), prefill, loads, 10.0).num_chunks == 0
    assert choose_load(prompt(), prefill, loads, 3600.0).num_chunks == 15, "it is retried"


def test_store_that_becomes_slow_delays_two_prompts_and_an_outlier_none():
    prefill, loads = measured()
    slow_and_late(loads, 0.0)
    slow_and_late(loads, 5.0)  # next to the other one: the same outlier
    assert choose_load(prompt(), prefill, loads, 15.0).num_chunks == 15
    loads.learn("store", 15 << 20, 0.017, 15.0)
    slow_and_late(loads, 15.0)
    assert choose_load(prompt(), prefill, loads, 25.0).num_chunks == 15
    slow_and_late(loads, 25.0)
    assert choose_load(prompt(), prefill, loads, 35.0).num_chunks == 0
    assert loads.seconds("store", 15 << 20, 35.0) == pytest.approx(500.0)
    slow_and_late(loads, 35.0, 1500.0)
    assert 500.0 < loads.seconds("store", 15 << 20, 45.0) < 1500.0, "earlier timeouts count"


def test_weights_are_not_negative():
    model = FadingLeastSquares([((1.0, 0.0), 1e-3)])
    for nbytes, seconds in ((1, 1.0), (2, 0.5), (3, 0.1)):
        model.learn((1.0, nbytes), seconds, 0.0)
    assert model.estimate((1.0, 1e9), 0.0) >= 0


@pytest.mark.parametrize(
    ("load_s", "compute_s", "wanted"),
    [(0.0, 1.0, 0), (1.0, 10.0, 0), (1.0, 2.0, 1), (2.0, 1.0, 17), (1.0, 0.0, 32)],
)
def test_step_starts_when_it_will_hardly_wait(load_s, compute_s, wanted):
    """With l seconds to load and c to compute a layer, a step starts after L - (L - 1) c / l
    layers; after none if l is small compared with c."""
    assert layers_before_release(LAYERS, load_s, compute_s) == wanted


def test_released_step_ends_within_one_layer_of_optimum():
    for load_s in (0.1, 0.5, 1.0, 3.0):
        for compute_s in (0.05, 0.4, 1.0, 5.0):
            layer_s, step_s = load_s / LAYERS, compute_s / LAYERS
            now = layers_before_release(LAYERS, load_s, compute_s) * layer_s
            begun = now
            for layer in range(LAYERS):
                now = max(now, (layer + 1) * layer_s) + step_s
            assert now - begun - compute_s <= layer_s + 1e-9, "it waits inside the batch"
            best = max(load_s + step_s, compute_s + layer_s)
            assert now <= best + layer_s + 1e-9
