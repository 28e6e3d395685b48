"""Calibration recovers the costs of a modelled instance, and names failed measurements."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import accumulate
from pathlib import Path

import pytest
from support.conductor_traces import write_trace

from mooncake_conductor.calibration.live_instance import LiveInstance, TimedCompletion
from mooncake_conductor.calibration.measured_costs import (
    CalibrationPlan,
    calibrate,
    read_row,
    write_row,
)
from mooncake_conductor.cli import main
from mooncake_conductor.cost.latency_model import LatencyModel
from mooncake_conductor.errors import CalibrationFailed, ConductorConfigError

TRUTH = LatencyModel(0.01, 2e-5, 4e-9, 0.005, 3e-4, 1e-7)
FIRST_TOKEN = 0.003
PLAN = CalibrationPlan()


class Modelled:
    """An instance with the costs of ``TRUTH``, which expects the requests of ``PLAN`` in order."""

    model = "modelled"

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._batches = [batch for batch in PLAN.batches for _ in range(batch)]
        self._batches *= len(PLAN.decode_context)
        # Prompts computed before each answer: only its own, then those queued ahead of it, too.
        self._waits = [1] * (PLAN.repeats + 1) + [*range(1, PLAN.queue + 1)]
        self._waits *= len(PLAN.prompt_tokens)

    def complete(self, prompt, num_tokens: int) -> TimedCompletion:
        first = TRUTH.prefill_seconds(len(prompt), 0)
        if num_tokens == 1:
            with self._lock:
                waits = self._waits.pop(0)
            return TimedCompletion(0.0, (FIRST_TOKEN + waits * first,))
        with self._lock:
            batch = self._batches.pop(0)
        step = TRUTH.step_seconds(batch, batch * (len(prompt) + PLAN.decode_tokens / 2))
        return TimedCompletion(0.0, tuple(accumulate([first, *[step] * (num_tokens - 1)])))


def test_calibration_recovers_the_costs_of_an_instance(tmp_path: Path) -> None:
    row = calibrate("here", Modelled(), PLAN)
    found = row.latency
    for tokens in (100, 1000, 3000):
        assert found.prefill_seconds(tokens, 0) == pytest.approx(
            TRUTH.prefill_seconds(tokens, 0), rel=0.01
        )
    for batch, context in ((1, 100), (8, 8000), (16, 20000)):
        assert found.step_seconds(batch, context) == pytest.approx(
            TRUTH.step_seconds(batch, context), rel=0.01
        )
    assert max(row.prefill_error, row.step_error) < 0.01
    assert row.first_token == pytest.approx(FIRST_TOKEN, rel=0.05)
    path = tmp_path / "row.json"
    write_row(path, row)
    assert read_row(path) == row
    trace = write_trace(tmp_path / "trace.jsonl", 10, per_second=3.0)
    assert main(["simulate", str(trace), "--calibrated", str(path)]) == 0


def test_invalid_row_and_invalid_plan_are_rejected(tmp_path: Path) -> None:
    path = tmp_path / "row.json"
    with pytest.raises(ConductorConfigError, match="can't read"):
        read_row(path)
    path.write_text("{}")
    with pytest.raises(ConductorConfigError, match="is no row of mooncake-conductor calibrate"):
        read_row(path)
    with pytest.raises(ConductorConfigError, match="a calibration needs"):
        CalibrationPlan(prompt_tokens=())
    with pytest.raises(ConductorConfigError, match="2 prompts in a queue"):
        CalibrationPlan(queue=1)


def test_row_of_an_older_version_is_read(tmp_path: Path) -> None:
    costs = dict.fromkeys(("fixed", "per_token", "per_token_squared", "step"), 0.5)
    costs |= dict.fromkeys(("step_per_sequence", "step_per_context_token"), 0.0)
    path = tmp_path / "row.json"
    path.write_text(
        json.dumps({"name": "a", "model": "b", "prefill_error": 0, "step_error": 0} | costs)
    )
    row = read_row(path)
    assert (row.first_token, row.hand_over, row.join_steps) == (0.0, 0.0, 0)


def test_event_with_several_tokens_counts_as_several_steps() -> None:
    done = TimedCompletion(1.0, (2.0, 4.0, 6.0), num_tokens=9)
    assert (done.ttft, done.mean_gap, done.tokens_per_part) == (1.0, 0.5, 4.0)
    assert TimedCompletion(1.0, (2.0, 4.0, 6.0)).mean_gap == 2.0
    assert TimedCompletion(1.0, (2.0,), num_tokens=1).mean_gap == 0.0


class Answers(BaseHTTPRequestHandler):
    """Streams one event per requested token; rejects prompts of 13 tokens, and sends no token for
    prompts of 14."""

    def do_GET(self) -> None:
        self._say(200, json.dumps({"data": [{"id": "tiny"}]}).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert (body["model"], body["stream"], body["ignore_eos"]) == ("tiny", True, True)
        if len(body["prompt"]) == 13:
            self._say(400, b"unlucky")
            return
        count = 0 if len(body["prompt"]) == 14 else body["max_tokens"]
        self._say(200, b'data: {"choices": []}\n\n' * count + b"data: [DONE]\n\n")

    def _say(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def url():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join(10)


def test_live_instance_is_timed(url: str) -> None:
    instance = LiveInstance(url)
    done = instance.complete([9] * 20, 5)
    assert instance.model == "tiny"
    assert (len(done.arrivals), len(done.gaps)) == (5, 4)
    assert done.ttft > 0


def test_failed_request_is_reported_in_one_line(url: str, tmp_path: Path, capsys) -> None:
    instance = LiveInstance(url)
    with pytest.raises(CalibrationFailed, match="answered 400: unlucky"):
        instance.complete([9] * 13, 1)
    with pytest.raises(CalibrationFailed, match="without a token"):
        instance.complete([9] * 14, 1)
    with pytest.raises(CalibrationFailed, match="http://HOST:PORT"):
        LiveInstance("localhost:8000")
    assert main(["calibrate", "http://127.0.0.1:9", "--out", str(tmp_path / "row.json")]) == 1
    assert "can't be reached" in capsys.readouterr().err


def test_calibrate_command_writes_a_row(url: str, tmp_path: Path, capsys) -> None:
    path = tmp_path / "row.json"
    small = ["--prompt-tokens", "16,32", "--batches", "1", "--decode-context", "16"]
    assert main(["calibrate", url, "--out", str(path), *small]) == 0
    assert "per_token" in capsys.readouterr().out
    assert read_row(path).model == "tiny"


@pytest.mark.parametrize("url", ["http://h:99999", "http://h:port", "http://[::1", "h:80"])
def test_invalid_url_is_reported(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calibrate", url]) == 1
    said = f"mooncake-conductor: an instance is http://HOST:PORT, found {url!r}\n"
    assert capsys.readouterr().err == said
