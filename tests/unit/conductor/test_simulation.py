"""The simulator: plausible, reproducible, and it ranks the policies as the paper does."""

from __future__ import annotations

import csv
import json
import random
from pathlib import Path

import pytest
from support.conductor_traces import write_trace

from mooncake_conductor.cli import main
from mooncake_conductor.conductor import ConductorSettings
from mooncake_conductor.cost.latency_model import cold_start
from mooncake_conductor.errors import InvalidTrace
from mooncake_conductor.simulator.results import is_within, summarise, swing
from mooncake_conductor.simulator.simulation import Cluster, Simulation
from mooncake_conductor.simulator.trace_file import (
    TraceRequest,
    at_random,
    read_trace,
    replicated,
    scaled,
)
from mooncake_conductor.slo_admission import AdmissionMode, Objective, Objectives

A800 = cold_start("llama-3-70b", "A800", 8)
WANTED = Objective(30.0, 0.1)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return write_trace(tmp_path / "trace.jsonl", num_requests=400, per_second=3.0)


def run(requests, policy="cost", seed=0, num_prefill=4, cache_tokens=400_000, **settings):
    cluster = Cluster(num_prefill, 4, A800, cache_tokens=cache_tokens)
    return Simulation(cluster, ConductorSettings(policy, **settings), seed=seed).run(requests)


def test_single_request_takes_its_modelled_time() -> None:
    result = run([TraceRequest(2.0, 8192, 101, tuple(range(16)))])
    record = result.records[0]
    assert record.ttft == pytest.approx(A800.prefill_seconds(8192, 0))
    assert record.mean_tbt == pytest.approx(A800.step_seconds(1, 8193 + 50), rel=0.01)
    assert record.ended_at - 2.0 == pytest.approx(record.ttft + 100 * record.mean_tbt, abs=0.2)


def test_path_overheads_delay_the_client() -> None:
    """Overheads of the first token and the hand-over, which includes 2 ms of transfer setup."""
    request = TraceRequest(2.0, 8192, 101, tuple(range(16)))
    found = []
    for way in ({}, {"first_token_s": 0.3, "hand_over_s": 0.502}):
        cluster = Cluster(1, 1, A800, **way)
        found += Simulation(cluster, ConductorSettings(binds_late=True)).run([request]).records
    plain, late = found
    assert late.ttft == pytest.approx(plain.ttft + 0.3)
    assert late.mean_tbt == pytest.approx(plain.mean_tbt)
    assert late.ended_at == pytest.approx(plain.ended_at + 0.8)
    assert late.mean_gap == pytest.approx(plain.mean_gap + 0.5 / 100)
    moved = 8192 * 327_680 / 50e9 + 0.002
    assert plain.mean_gap == pytest.approx(plain.mean_tbt + moved / 100)
    one = run([TraceRequest(2.0, 8192, 1, tuple(range(16)))]).records[0]
    assert one.mean_gap is None


def test_runs_are_reproducible_and_random_choices_follow_the_seed(trace: Path) -> None:
    requests = read_trace(trace)
    assert run(requests).records == run(requests).records
    assert run(requests, "random").records != run(requests, "random", seed=1).records


def test_all_requests_complete_and_no_reservation_remains(trace: Path) -> None:
    requests = read_trace(trace)
    for mode in AdmissionMode:
        cluster = Cluster(2, 2, A800, max_batch=8)
        settings = ConductorSettings(admission=mode, objectives=Objectives(WANTED))
        simulation = Simulation(cluster, settings)
        records = simulation.run(requests).records
        assert all((r.ended_at is None) == bool(r.refused) for r in records), mode
        assert (len(simulation.conductor.book), len(simulation.conductor.ledger)) == (0, 0)


def test_index_equals_the_caches_at_the_end(trace: Path) -> None:
    from mooncake_conductor.index.holder_sets import Tier

    simulation = Simulation(Cluster(4, 2, A800, cache_tokens=200_000), ConductorSettings())
    simulation.run(read_trace(trace))
    for slot, node in simulation._prefill.items():
        count = simulation.conductor.index.num_held(slot, Tier.HOST)
        assert count == len(node.cache) > 0


def test_policies_rank_as_in_the_paper(trace: Path) -> None:
    requests = scaled(read_trace(trace), 0.6)
    names = ("random", "least-loaded", "cache-local", "mooncake")
    cache_size = {"cache_tokens": 2_000_000}
    mean = [summarise(run(requests, name, **cache_size), WANTED).mean_ttft for name in names]
    assert mean == sorted(mean, reverse=True)
    cost = summarise(run(requests, "cost", **cache_size), WANTED).mean_ttft
    assert cost <= 1.05 * mean[-1]


def test_admitted_requests_meet_the_objective(trace: Path) -> None:
    requests = scaled(read_trace(trace), 6.0)
    settings = {
        "admission": AdmissionMode.PREDICTIVE,
        "objectives": Objectives(Objective(5.0, 0.1)),
    }
    records = run(requests, num_prefill=2, **settings).records
    admitted = [record for record in records if not record.refused]
    assert 0 < len(admitted) < len(records)
    within = sum(is_within(record, Objective(5.0, 0.1)) for record in admitted)
    assert within / len(admitted) >= 0.95
    assert all(1 <= r.retry_after_s <= 60 for r in records if r.stage == "arrival")


def test_turns_of_a_session_run_in_order(tmp_path: Path) -> None:
    lines = [
        {"timestamp": 0, "session_id": 1, "input_length": 1024, "output_length": 10},
        {"timestamp": 1, "session_id": 1, "input_length": 500, "output_length": 5, "delay": 2000},
        {"timestamp": 1, "input_tokens": 100, "output_tokens": 1},
    ]
    path = tmp_path / "sessions.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in lines))
    requests = read_trace(path, is_delta=True)
    assert [request.num_input for request in requests] == [1024, 1534, 100]
    assert requests[0].keys == requests[1].keys
    assert len(requests[0].keys) == 2
    records = run(requests).records
    assert records[1].arrived_at == pytest.approx(records[0].ended_at + 2.0, abs=0.1)


def test_times_are_relative_to_the_first_request(
    tmp_path: Path,
) -> None:
    """With Unix timestamps the simulator would otherwise sample half a century of idle time."""
    lines: list[dict[str, object]] = [
        {"timestamp": 1_760_000_002_000, "session_id": "a", "input_length": 1, "output_length": 1},
        {"session_id": "a", "delay": 50, "input_length": 2, "output_length": 1},
        {"timestamp": 1_760_000_000_000, "input_length": 3, "output_length": 1},
        {"session_id": "a", "delay": 50, "input_length": 4, "output_length": 1},
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    found = read_trace(path)
    assert [(each.at_s, each.num_input) for each in found] == [(0, 3), (2, 1), (2, 2), (2, 4)]


def test_replicated_traces_share_no_keys(trace: Path) -> None:
    once = read_trace(trace)[:50]
    thrice = replicated(once, 3, random.Random(0))
    assert len(thrice) == 150
    assert thrice == sorted(thrice, key=lambda request: request.at_s)
    span = 1 + max(key for request in once for key in request.keys)
    of_users = [
        {key for request in thrice for key in request.keys if key // span == number}
        for number in range(3)
    ]
    assert {len(keys) for keys in of_users} == {len(of_users[0])}
    assert set(once) <= set(thrice)
    assert replicated(once, 3, random.Random(0)) == thrice


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "holds no request"),
        ("{}", ":1 lacks input_length"),
        ('{"input_length": 0, "output_length": 1}', ":1 is no request"),
        ("[1]", ":1 is no request"),
    ],
)
def test_invalid_trace_is_rejected(tmp_path: Path, text: str, complaint: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    with pytest.raises(InvalidTrace, match=complaint):
        read_trace(path)


def test_missing_trace_is_reported_in_one_line(tmp_path: Path, capsys) -> None:
    assert main(["simulate", str(tmp_path / "none")]) == 1
    assert "can't read the trace" in capsys.readouterr().err


def test_simulate_command_writes_table_csv_and_page(trace: Path, tmp_path: Path, capsys) -> None:
    files = [tmp_path / "requests.csv", tmp_path / "page.html"]
    options = ["--limit", "100", "--csv", str(files[0]), "--html", str(files[1])]
    assert main(["simulate", str(trace), "--prefill", "2", "--decode", "2", *options]) == 0
    assert "TTFT mean s" in capsys.readouterr().out
    rows = list(csv.DictReader(files[0].read_text().splitlines()))
    assert len(rows) == 100
    assert float(rows[0]["ttft"]) > 0
    html = files[1].read_text()
    assert html.count("<svg") == 5
    assert f"mooncake-conductor simulate {trace} --prefill 2 --decode 2 --limit 100" in html
    assert "http" not in html.replace("http-equiv", "")


def test_compare_command_runs_every_cell_once(trace: Path, tmp_path: Path, capsys) -> None:
    page = tmp_path / "page.html"
    grid = ["--policies", "random,cost", "--loads", "1,2", "--caches", "1e5,1e6"]
    assert main(["compare", str(trace), "--limit", "50", *grid, "--html", str(page)]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 9
    assert page.read_text().count("<svg") == 3


def test_swing_statistics_are_in_range(trace: Path) -> None:
    result = run(read_trace(trace))
    found = swing(result)
    assert found.prefill_sd >= 0
    assert -1.001 <= found.correlation <= 1.001


def test_poisson_arrivals_keep_the_order_and_the_rate(trace: Path, capsys) -> None:
    asked = read_trace(trace)
    spread = at_random(asked * 20, 5.0, random.Random(1))
    assert [(each.keys, each.num_output) for each in spread] == [
        (each.keys, each.num_output) for each in asked * 20
    ]
    times = [each.at_s for each in spread]
    assert times == sorted(times)
    assert times[-1] == pytest.approx(len(spread) / 5.0, rel=0.1)
    assert main(["simulate", str(trace), "--poisson", "5", "--limit", "50"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("load: prefill queue ")


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--html", "absent/page.html", "there is no folder absent"),
        ("--csv", "absent/requests.csv", "there is no folder absent"),
        ("--cache-tokens", "inf", "must be at least 1, got inf"),
        ("--load", "much", "must be a number, got 'much'"),
    ],
)
def test_unusable_options_are_reported_before_the_run(
    option: str, value: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["simulate", str(tmp_path / "never-read"), option, value])
    assert f"argument {option}: " in (said := capsys.readouterr().err)
    assert message in said


def test_file_that_can_not_be_written_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 9, "output_length": 2, "hash_ids": [1]}\n')
    assert main(["simulate", str(trace), "--html", str(tmp_path)]) == 1
    assert capsys.readouterr().err.startswith("mooncake-conductor: [Errno 21] Is a directory: ")
