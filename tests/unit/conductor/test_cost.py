"""Latency models: the paper's figures, the online fit, running quantiles and the link calendar."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from mooncake_conductor.cost.latency_model import (
    DEVICES,
    MODELS,
    LatencyModel,
    cold_start,
    estimate,
)
from mooncake_conductor.cost.link_calendar import Fetch, LinkCalendar
from mooncake_conductor.cost.online_fit import LatencyEstimator, OnlineFit, RunningQuantile
from mooncake_conductor.errors import ConductorConfigError

# FAST'25, figure 14: one node of 8×A800, LLaMA3-70B; prompt tokens: seconds with 0, 95 % cached
MEASURED = {
    8192: (0.97, 0.14),
    16384: (2.08, 0.23),
    32768: (4.44, 0.41),
    65536: (10.58, 0.89),
    131072: (27.54, 2.34),
}


@pytest.mark.parametrize("num_tokens", MEASURED)
def test_prefill_times_match_the_paper_within_8_percent(num_tokens: int) -> None:
    model = cold_start("llama-3-70b", "A800", 8)
    without, with_cache = MEASURED[num_tokens]
    assert model.prefill_seconds(num_tokens, 0) == pytest.approx(without, rel=0.08)
    if num_tokens >= 32768:  # the fixed cost dominates shorter prompts
        cached = model.prefill_seconds(num_tokens, 0.95 * num_tokens)
        assert cached == pytest.approx(with_cache, rel=0.25)


def test_estimate_from_peak_rates_is_near_the_measured_node() -> None:
    measured = cold_start("llama-3-70b", "A800", 8)
    estimated = estimate(MODELS["llama-3-70b"], DEVICES["A800"], 8)
    assert estimated.per_token == pytest.approx(measured.per_token, rel=0.25)
    assert estimated.step == pytest.approx(measured.step, rel=0.6)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("model", MODELS)
def test_every_model_and_device_has_costs(model: str, device: str) -> None:
    costs = cold_start(model, device, 8)
    assert 0 < costs.prefill_seconds(8192, 4096) < costs.prefill_seconds(8192, 0)
    assert costs.step_seconds(1, 0) < costs.step_seconds(2, 100)


def test_unknown_model_or_device_is_named() -> None:
    with pytest.raises(ConductorConfigError, match="no device 'B9': there are A100"):
        cold_start("llama-3-8b", "B9", 8)
    with pytest.raises(ConductorConfigError, match="no model 'x'"):
        cold_start("x", "A100", 8)
    with pytest.raises(ConductorConfigError, match="0 devices: an instance has 1 or more"):
        cold_start("llama-3-8b", "A100", 0)
    with pytest.raises(ConductorConfigError, match="at least 0"):
        LatencyModel(-1, 0, 0, 0, 0, 0)


@pytest.mark.parametrize("wrong_by", [0.3, 1.0, 3.0])
@pytest.mark.parametrize("prefill", [(0.01, 3e-5, 3e-10), (0.1, 1e-4, 1e-9), (0.4, 5e-4, 0.0)])
def test_fit_recovers_the_costs_behind_the_reports(prefill, wrong_by: float) -> None:
    truth = LatencyModel(*prefill, 0.02, 1e-4, 3e-8)
    cold = (wrong_by * c for c in (*truth.prefill_coefficients, *truth.step_coefficients))
    estimator, rng = LatencyEstimator(LatencyModel(*cold)), random.Random(7)
    for _ in range(1500):
        n = rng.randrange(500, 60_000)
        p = rng.randrange(n)
        estimator.prefilled(n, p, truth.prefill_seconds(n, p))
        b, c = rng.randrange(1, 64), rng.randrange(1000, 500_000)
        estimator.stepped(b, c, truth.step_seconds(b, c))
    found = estimator.model()
    for n, p in ((2000, 0), (30_000, 10_000), (50_000, 0)):
        assert found.prefill_seconds(n, p) == pytest.approx(truth.prefill_seconds(n, p), rel=0.05)
    wanted = truth.step_seconds(32, 200_000)
    assert found.step_seconds(32, 200_000) == pytest.approx(wanted, rel=0.05)


@pytest.mark.parametrize("scale", [1, 10, 100])
def test_fit_converges_after_24_prompts_of_any_length(scale: int) -> None:
    """The cold start weighs as much as one report, however short the prompts are."""
    truth, rng = LatencyModel(0.002, 4e-4, 0.0, 0.02, 0.0, 0.0), random.Random(5)
    estimator = LatencyEstimator(cold_start("llama-3-8b", "A100", 1))
    for _ in range(24):
        num_tokens = scale * rng.randrange(50, 400)
        estimator.prefilled(num_tokens, 0, truth.prefill_seconds(num_tokens, 0))
    found = estimator.model()
    for num_tokens in (100 * scale, 200 * scale, 400 * scale):
        wanted = truth.prefill_seconds(num_tokens, 0)
        assert found.prefill_seconds(num_tokens, 0) == pytest.approx(wanted, rel=0.15)


@pytest.mark.parametrize("num_before", [0, 2, 30])
def test_single_outlier_report_is_ignored(num_before: int) -> None:
    """Such as a first request that compiles kernels, or an instance that was descheduled."""
    truth = LatencyModel(0.02, 1e-4, 0.0, 0.02, 0.0, 0.0)
    estimator = LatencyEstimator(truth)
    for _ in range(num_before):
        estimator.prefilled(1000, 0, truth.prefill_seconds(1000, 0))
    estimator.prefilled(1000, 0, 100 * truth.prefill_seconds(1000, 0))
    estimator.prefilled(1000, 0, truth.prefill_seconds(1000, 0))
    found = estimator.model().prefill_seconds(1000, 0)
    assert found == pytest.approx(truth.prefill_seconds(1000, 0))


@pytest.mark.parametrize("wrong_by", [30, 1000])
def test_fit_recovers_from_a_cold_start_that_is_far_off(wrong_by: int) -> None:
    truth, rng = LatencyModel(2.0, 1e-2, 0.0, 2.0, 0.0, 0.0), random.Random(3)
    cold = (c / wrong_by for c in (*truth.prefill_coefficients, *truth.step_coefficients))
    estimator = LatencyEstimator(LatencyModel(*cold))
    for _ in range(10):
        num_tokens = rng.randrange(100, 4000)
        estimator.prefilled(num_tokens, 0, truth.prefill_seconds(num_tokens, 0))
    found = estimator.model().prefill_seconds(1000, 0)
    assert found == pytest.approx(truth.prefill_seconds(1000, 0), rel=0.2)


@given(st.lists(st.tuples(st.floats(0, 1e5), st.floats(-1, 1e3)), max_size=60))
@settings(deadline=None)
def test_coefficients_are_never_negative(reports) -> None:
    fit = OnlineFit((0.1, 1e-4), (1.0, 4096.0))
    for size, seconds in reports:
        fit.report((1.0, size), seconds)
    assert min(fit.coefficients()) >= 0


@given(st.lists(st.floats(0, 100), min_size=1, max_size=40))
@settings(deadline=None)
def test_running_quantile_covers_the_last_window(values) -> None:
    quantile = RunningQuantile(0.5, initial=7.0, window=8)
    assert quantile.value == 7.0
    for value in values:
        quantile.report(value)
    recent = sorted(values[-8:])
    assert quantile.value == recent[len(recent) // 2]


def test_transfers_queue_at_both_ends() -> None:
    links = LinkCalendar(np.array([10.0, 10.0, 5.0]), setup_s=1.0)
    assert links.book(0, 1, 100.0, now=0.0).done == 11.0
    # The sender is busy, the receiver slower.
    assert links.book(0, 2, 50.0, now=0.0).done == 22.0
    assert links.book(2, 1, 0.0, now=3.0).done == 3.0
    fetches = (Fetch(0, 0, 1), Fetch(2, 1, 2))
    booked = links.book_all(fetches, 1, 10.0, now=30.0)
    assert max(each.done for each in booked) == pytest.approx(37.0)
    links.clear(0, now=30.0)
    assert links.sending_until[0] == 30.0


def test_early_release_moves_later_transfers_forward() -> None:
    links = LinkCalendar(np.full(3, 10.0), setup_s=0.0)
    first = links.book(0, 1, 100.0, now=0.0)
    links.book(0, 2, 50.0, now=0.0)
    links.release(first, now=4.0)
    assert (links.sending_until[0], links.receiving_until[1]) == (9.0, 4.0)
    links.release(first, now=20.0)
    never = links.book(1, 2, 30.0, now=9.0)  # behind the second one
    links.release(never, now=9.0)
    assert links.receiving_until[2] == 15.0
    assert links.sending_until[0] == 9.0
