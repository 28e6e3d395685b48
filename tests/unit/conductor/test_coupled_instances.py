"""Simulated coupled instances: the time of one request, and how prompts delay decodes."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.conductor_traces import write_trace

from mooncake_conductor.cli import main
from mooncake_conductor.cost.latency_model import cold_start
from mooncake_conductor.simulator.coupled_instances import WHOLE_PROMPTS, CoupledSimulation
from mooncake_conductor.simulator.simulation import Cluster
from mooncake_conductor.simulator.trace_file import TraceRequest, read_trace

A800 = cold_start("llama-3-70b", "A800", 8)
SIZES = pytest.mark.parametrize("step_tokens", [512, WHOLE_PROMPTS])


def run(requests, step_tokens: int, num_instances: int = 1):
    cluster = Cluster(num_instances, 0, A800)
    return CoupledSimulation(cluster, step_tokens).run(requests).records


@SIZES
def test_single_request_takes_its_modelled_time(step_tokens: int) -> None:
    (record,) = run([TraceRequest(2.0, 8192, 101, tuple(range(16)))], step_tokens)
    assert record.ttft == pytest.approx(A800.prefill_seconds(8192, 0))
    assert record.mean_tbt == pytest.approx(A800.step_seconds(1, 8193 + 50), rel=0.01)
    assert record.ended_at == pytest.approx(2.0 + record.ttft + 100 * record.mean_tbt)


def test_prompt_delays_decodes_by_one_step_only() -> None:
    requests = [
        TraceRequest(0.0, 512, 400, (1,)),
        TraceRequest(3.0, 65536, 2, tuple(range(9, 137))),
    ]
    whole, _ = run(requests, WHOLE_PROMPTS)
    chunked, _ = run(requests, 512)
    prompt = A800.prefill_seconds(65536, 0)
    assert whole.tail_tbt * 40 == pytest.approx(prompt + 39 * A800.step_seconds(1, 700), rel=0.05)
    per_chunk = prompt / 128
    assert per_chunk < chunked.tail_tbt < 2 * per_chunk + A800.step_seconds(1, 700)
    assert whole.ended_at == pytest.approx(chunked.ended_at, rel=0.25)


def test_prompt_reuses_the_cache_of_its_instance() -> None:
    keys = tuple(range(16))
    requests = [TraceRequest(10.0 * n, 8192, 2, keys) for n in range(2)]
    first, second = run(requests, 512)
    assert (first.num_reused, second.num_reused) == (0, 8191)
    assert second.ttft == pytest.approx(A800.prefill_seconds(8192, 8191))


@SIZES
def test_all_requests_complete(tmp_path: Path, step_tokens: int) -> None:
    requests = read_trace(write_trace(tmp_path / "trace.jsonl", 200, per_second=4.0))
    records = run(requests, step_tokens, num_instances=4)
    assert all(r.ended_at + 1e-6 >= r.arrived_at + r.ttft > r.arrived_at for r in records)
    assert all(r.tail_tbt >= r.mean_tbt * 0.999 for r in records if r.tail_tbt is not None)


def test_goodput_command_covers_every_system(tmp_path: Path, capsys) -> None:
    trace = write_trace(tmp_path / "trace.jsonl", 60, per_second=3.0)
    drawn = tmp_path / "goodput.svg"
    nodes = ["--prefill", "2", "--decode", "2", "--slo-ttft", "10x", "--slo-tbt", "5x"]
    assert main(["goodput", str(trace), *nodes, "--loads", "1,4", "--svg", str(drawn)]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 9
    assert drawn.read_text().count("<polyline") == 4
    with pytest.raises(SystemExit):
        main(["goodput", str(trace), "--admission", "early"])
    assert "unrecognized arguments: --admission early" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["goodput", str(trace), "--systems", "another"])
    assert "no system another: there are conductor" in capsys.readouterr().err
