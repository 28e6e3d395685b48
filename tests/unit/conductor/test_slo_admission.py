"""Admission by SLO: which forecasts are rejected, with which code and ``Retry-After``."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, strategies as st
from support.conductor_fleets import ask, make_conductor

from mooncake_conductor.conductor import Conductor
from mooncake_conductor.errors import ConductorConfigError
from mooncake_conductor.slo_admission import (
    ADMITTED,
    Admission,
    AdmissionMode,
    Forecast,
    Objective,
    Objectives,
    Refusal,
    UnloadedLatency,
    objective,
)

WANTED = Objectives(Objective(2.0, 0.1), {"batch": Objective(20.0, 1.0, is_best_effort=True)})
MODES = tuple(AdmissionMode)


def admission(mode: AdmissionMode) -> Admission:
    return Admission(mode, WANTED, random.Random(1))


@pytest.mark.parametrize(
    ("forecast", "refused"),
    [
        (Forecast(1.0, 0.05), (None, None, None, None)),
        (Forecast(3.0, 0.05), (None, *[Refusal.SLO_TTFT] * 3)),
        (Forecast(1.0, 0.2), (None, None, Refusal.SLO_TBT, Refusal.SLO_TBT)),
        (Forecast(3.0, 0.2), (None, *[Refusal.SLO_TTFT] * 3)),
    ],
)
def test_each_mode_checks_its_own_loads(forecast, refused) -> None:
    found = tuple(admission(mode).at_arrival("default", forecast).refusal for mode in MODES)
    assert found == refused


def test_no_decode_capacity_has_its_own_code() -> None:
    nowhere = Forecast(1.0, math.inf)
    endless = Admission(AdmissionMode.EARLY, Objectives(), random.Random(1))
    assert endless.at_arrival("default", nowhere).refusal is Refusal.DECODE_FULL
    assert admission(AdmissionMode.BASELINE).at_arrival("default", nowhere) == ADMITTED
    late = admission(AdmissionMode.BASELINE).after_prefill("default", nowhere)
    assert late.refusal is Refusal.DECODE_FULL
    assert admission(AdmissionMode.NONE).after_prefill("default", nowhere) == ADMITTED


@given(st.floats(0, 1e9), st.integers())
def test_retry_after_is_1_to_60_seconds_near_the_drain_time(seconds: float, seed: int) -> None:
    asked = Admission(AdmissionMode.EARLY, WANTED, random.Random(seed)).retry_after(seconds)
    assert 1 <= asked <= 60
    if 2 <= seconds <= 40:
        assert 0.8 * seconds <= asked <= 1.2 * seconds + 1


def test_retry_after_is_jittered() -> None:
    asked = admission(AdmissionMode.EARLY)
    assert len({asked.retry_after(30.0) for _ in range(100)}) > 5
    assert asked.retry_after(math.inf) == 60


def test_late_first_token_sets_retry_after() -> None:
    verdict = admission(AdmissionMode.EARLY).at_arrival("default", Forecast(12.0, 0.05))
    assert 8 <= verdict.retry_after_s <= 12


def test_best_effort_requests_are_shed_gradually() -> None:
    asked = admission(AdmissionMode.EARLY)

    def share(load: float) -> float:
        forecast = Forecast(20.0 * load, 0.01)
        refused = [asked.at_arrival("batch", forecast).refusal for _ in range(2000)]
        return refused.count(Refusal.SHED) / len(refused)

    assert share(0.3) < 0.02
    assert share(0.7) == pytest.approx(0.7**5, abs=0.04)
    assert share(0.9) == pytest.approx(0.9**5, abs=0.04)


def test_multiples_refer_to_unloaded_latency_and_the_tighter_limit_holds() -> None:
    wanted = objective("10x", "5x").in_seconds(UnloadedLatency(0.3, 0.02))
    assert (wanted.ttft_s, wanted.tbt_s) == pytest.approx((3.0, 0.1))
    both = Objective(ttft_s=2.0, ttft_scale=10.0).in_seconds(UnloadedLatency(0.3, 0.02))
    assert both == Objective(2.0, math.inf)
    assert objective("30000", "100ms") == Objective(30.0, 0.1)
    with pytest.raises(ConductorConfigError, match=r"a multiple of the unloaded request.*'soon'"):
        objective("soon", "100")


def test_conductor_rejects_by_multiples_of_unloaded_latency() -> None:
    wanted = Objectives(Objective(ttft_scale=3.0))
    conductor = make_conductor(1, admission=AdmissionMode.EARLY, objectives=wanted)
    verdicts = [conductor.route(ask(f"r{n}", 8, 100 * n), now=0.0).verdict for n in range(4)]
    assert [v.refusal for v in verdicts] == [None, None, None, Refusal.SLO_TTFT]
    assert conductor.route(ask("long", 64, 1000), now=0.0).verdict.is_admitted


def test_objective_of_zero_is_rejected() -> None:
    with pytest.raises(ConductorConfigError, match="must be above 0, found"):
        Objective(ttft_s=0.0)


def test_baseline_rejects_after_the_prefill_and_leaves_no_reservation() -> None:
    """Two requests are prefilled for one decode slot: the second prefill is wasted."""
    modes = {}
    for mode in (AdmissionMode.BASELINE, AdmissionMode.PREDICTIVE):
        conductor = make_conductor(2, 1, admission=mode)
        conductor.fleet.max_batch[2] = 1
        first, second = (conductor.route(ask(n, 4, first=9 * i), 0.0) for i, n in enumerate("ab"))
        assert first.verdict.is_admitted
        assert conductor.prefilled("a", 1.0) == (ADMITTED, 2)
        conductor.joined("a", 1.0)
        late = conductor.prefilled("b", 1.5)[0].refusal if second.verdict.is_admitted else None
        modes[mode] = (second.verdict.refusal, late)
        assert len(conductor.book) == 1
    assert modes == {
        AdmissionMode.BASELINE: (None, Refusal.DECODE_FULL),
        AdmissionMode.PREDICTIVE: (Refusal.DECODE_FULL, None),
    }


def test_predictive_mode_admits_if_a_slot_is_free_after_the_prefill() -> None:
    """The slot is taken now and free when the prefill ends: early rejects, predictive admits."""
    refused = {}
    for mode in (AdmissionMode.EARLY, AdmissionMode.PREDICTIVE):
        conductor = make_conductor(1, 1, admission=mode)
        conductor.fleet.max_batch[1] = 1
        for number in range(20):  # requests of this class decode for half a second
            conductor.route(ask(f"past {number}", 1), float(number))
            conductor.prefilled(f"past {number}", number + 0.3)
            conductor.joined(f"past {number}", number + 0.3)
            conductor.finished(f"past {number}", number + 0.8)
        conductor.route(ask("a", 1), 100.0)
        conductor.prefilled("a", 100.2)
        conductor.joined("a", 100.2)
        refused[mode] = conductor.route(ask("b", 64, first=7), 100.3).verdict.refusal
    assert refused == {AdmissionMode.EARLY: Refusal.DECODE_FULL, AdmissionMode.PREDICTIVE: None}


def test_decision_is_explained_as_plain_data() -> None:
    conductor = make_conductor(2, 1)
    decision = conductor.route(ask("r", 4), now=3.0)
    data = decision.explain(conductor.fleet.names)
    assert data["prefill"]["instance"] in ("p0", "p1")
    assert data["prefill"]["plan"] == "recompute"
    assert (data["request"], data["refusal"], data["decode"]["instance"]) == ("r", None, "d0")


def late_by(seconds: float, **settings) -> Conductor:
    """A conductor with a TTFT objective of 2 s whose only request was prefilled this much late."""
    conductor = make_conductor(1, 1, admission=AdmissionMode.EARLY, objectives=WANTED, **settings)
    decision = conductor.route(ask("late", 1), 0.0)
    at = decision.prefill.ttft + seconds
    conductor.prefilled("late", at)
    conductor.joined("late", at)
    conductor.finished("late", at)
    return conductor


def test_past_delays_do_not_refuse_requests_of_an_idle_fleet_forever() -> None:
    """Only admitted requests report delays: old ones would be the latest ones for ever."""
    conductor = late_by(5.0, lateness_share=0.95)
    refused = [conductor.route(ask(f"r{at}", 1), at).verdict.refusal for at in (6.0, 60.0, 70.0)]
    assert refused == [Refusal.SLO_TTFT, Refusal.SLO_TTFT, None]


def test_idle_instance_is_tried_again_after_its_estimate_has_refused_everything_for_a_while() -> (
    None
):
    """Only admitted requests are measured: a wrong estimate would never be corrected."""
    conductor = late_by(0.0)
    for _ in range(8):
        conductor.measured_prefill(0, 513, 0, 5.0)
    times = (10.0, 40.0, 69.0, 71.0, 71.1)
    refused = [conductor.route(ask(f"r{at}", 1), at).verdict.refusal for at in times]
    assert refused == [*[Refusal.SLO_TTFT] * 3, None, Refusal.SLO_TTFT]
    assert conductor.prefilled("r71.0", 71.2) == (ADMITTED, 1)
    conductor.ended("r71.0", 71.3)
    refused = [conductor.route(ask(f"r{at}", 1), at).verdict.refusal for at in (72.0, 130.0, 133.0)]
    assert refused == [Refusal.SLO_TTFT, Refusal.SLO_TTFT, None]


def test_decode_instance_that_is_tried_again_may_decode() -> None:
    conductor = late_by(0.0)
    for _ in range(8):
        conductor.measured_step(1, 1, 513, 0.5)
    refused = [conductor.route(ask(f"r{at}", 1), at).verdict.refusal for at in (10.0, 71.0)]
    assert refused == [Refusal.SLO_TBT, None]
    assert conductor.prefilled("r71.0", 71.2) == (ADMITTED, 1)


def test_busy_instance_is_not_tried() -> None:
    conductor = make_conductor(1, 1, admission=AdmissionMode.EARLY, objectives=WANTED)
    assert conductor.route(ask("running", 1, first=9), 0.0).verdict.is_admitted
    for _ in range(8):
        conductor.measured_prefill(0, 513, 0, 5.0)
    refused = [conductor.route(ask(f"r{at}", 1), at).verdict.refusal for at in (1.0, 62.0)]
    assert refused == [Refusal.SLO_TTFT, Refusal.SLO_TTFT]
    conductor.ended("running", 62.1)
    assert conductor.route(ask("r", 1), 62.2).verdict.is_admitted
