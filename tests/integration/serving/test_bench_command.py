"""``mooncake-engine bench`` against real servers."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.fake_engine import FakeEngine, upper_case

from mooncake_engine.cli import build_parser
from mooncake_engine.errors import ConfigError, EngineError, Overloaded
from mooncake_engine.messages import EngineRequest
from mooncake_engine.replay.replay_command import ResultsNotWritten, bench

TRACE = [
    {"timestamp": 0, "input_length": 30, "output_length": 4, "hash_ids": [1, 2]},
    {"timestamp": 5, "input_length": 40, "output_length": 6, "hash_ids": [1, 3]},
    {"timestamp": 9, "input_length": 20, "output_length": 2, "hash_ids": [4]},
]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in TRACE))
    return path


def arguments(trace: Path, url: str, *options: str) -> argparse.Namespace:
    out = str(trace.with_name("result"))
    argv = ["bench", str(trace), "--url", url, "--out", out, "--block-tokens", "20", *options]
    return build_parser().parse_args(argv)


@pytest.mark.parametrize(
    "options", [(), ("--chat",), ("--concurrency", "1"), ("--rate", "50"), ("--speedup", "2")]
)
def test_every_request_is_sent_and_counted(
    served: Any, trace: Path, options: tuple[str, ...]
) -> None:
    # one token per byte; the fake engine repeats its prompt
    report = bench(
        arguments(trace, served.url, "--model", "fake", "--tokens-per-word", "5", *options)
    )
    assert report.summary.num_failed == 0
    assert [record.num_output for record in report.records] == [4, 6, 2]
    assert all(len(record.piece_times_s) == record.num_output for record in report.records)
    assert report.summary.late_s.max < 60
    found = json.loads(trace.with_name("result.json").read_bytes())
    assert found["summary"]["num_requests"] == 3
    assert trace.with_name("result.html").read_text().startswith("<!doctype html>")


@pytest.mark.parametrize("name", ["result.json", "result.html"])
def test_figures_of_a_run_outlive_a_full_disk(served: Any, trace: Path, name: str) -> None:
    trace.with_name(name).symlink_to("/dev/full")
    with pytest.raises(ResultsNotWritten, match=rf"{name}: No space left on device") as caught:
        bench(arguments(trace, served.url, "--model", "fake", "--tokens-per-word", "5"))
    assert "requests: 3 in " in str(caught.value)


def test_prompts_share_prefixes_as_in_trace(served: Any, trace: Path) -> None:
    bench(
        arguments(
            *(trace, served.url, "--model", "fake", "--tokens-per-word", "5"),
            *("--concurrency", "1", "--num-requests", "2"),
        )
    )
    first, second = (bytes(request.prompt_token_ids) for request in served.engine.seen)
    assert first.split()[:4] == second.split()[:4]
    assert first.split()[4:] != second.split()[4:]


def test_word_lengths_are_measured_at_endpoint(tiny_llama_url: str, trace: Path) -> None:
    report = bench(arguments(trace, tiny_llama_url, "--model", "tiny-llama"))
    assert [record.num_input for record in report.records] == pytest.approx([30, 40, 20], abs=8)


def test_failures_are_counted_and_first_one_reported(served: Any, trace: Path) -> None:
    engine: FakeEngine = served.engine
    engine.fail_at = 3  # the shortest answer completes before
    report = bench(arguments(trace, served.url, "--model", "fake", "--tokens-per-word", "5"))
    assert report.summary.num_failed == 2
    assert "first failure: bad luck" in report.table()
    engine.refusal = Overloaded("too many")
    with pytest.raises(EngineError, match="all requests failed; the first with: status 429"):
        bench(arguments(trace, served.url, "--model", "fake", "--tokens-per-word", "5"))


def test_unloaded_requests_run_first_and_set_the_objectives(served: Any, trace: Path) -> None:
    report = bench(
        arguments(
            *(trace, served.url, "--model", "fake", "--tokens-per-word", "5"),
            *("--slo-ttft-times", "1e9", "--slo-tbt-times", "1e9", "--unloaded-requests", "2"),
        )
    )
    lengths = [len(request.prompt_token_ids) for request in served.engine.seen]
    assert len(lengths) == 6, "one to warm up, the shortest and the longest alone, then the trace"
    assert len({bytes(request.prompt_token_ids) for request in served.engine.seen}) == 6
    assert report.objective.unloaded is not None
    assert len(report.objective.unloaded.num_input) == 2
    assert report.summary.good_share == 1.0
    assert "(within 1e+09)" in report.table()


def test_rejections_are_counted_separately(served: Any, trace: Path) -> None:
    def refuse_short_ones(request: EngineRequest) -> list[int]:
        if request.sampling.max_tokens == 2:
            raise Overloaded("too many")
        return upper_case(request)

    served.engine.script = refuse_short_ones
    report = bench(arguments(trace, served.url, "--model", "fake", "--tokens-per-word", "5"))
    assert (report.summary.num_refused, report.summary.num_failed) == (1, 0)
    assert "1 refused, 0 failed" in report.table()


@pytest.mark.parametrize(
    ("url", "options", "words"),
    [
        ("ftp://host", (), "--url must be http"),
        ("http://host:99999", (), "--url must be http"),
        ("http://127.0.0.1:9", (), "can't connect to http://127.0.0.1:9"),
        ("http://127.0.0.1:9", ("--slo-ttft", "0"), "--slo-ttft must be more than 0"),
        ("http://127.0.0.1:9", ("--slo-tbt-times", "0"), "--slo-tbt-times must be more than 0"),
        ("http://127.0.0.1:9", ("--num-requests", "0"), "--num-requests must be more than 0"),
    ],
)
def test_invalid_bench_options_are_rejected(
    trace: Path, url: str, options: tuple[str, ...], words: str
) -> None:
    with pytest.raises(EngineError, match=words):
        bench(arguments(trace, url, "--model", "fake", *options))


def test_bench_imports_no_torch() -> None:
    code = (
        "import sys, mooncake_engine.cli, mooncake_engine.replay.replay_command as command\n"
        "assert not {'torch', 'numpy', 'transformers'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_result_file_name_is_configurable(served: Any, trace: Path) -> None:
    out = trace.with_name("rate-0.5")  # a data point of its own
    options = ("--model", "fake", "--tokens-per-word", "5", "--out", str(out))
    bench(arguments(trace, served.url, *options))
    assert {path.name for path in out.parent.glob("rate*")} == {"rate-0.5.json", "rate-0.5.html"}


def test_unwritable_result_path_is_rejected_before_replay(served: Any, trace: Path) -> None:
    out = str(trace.with_name("missing") / "result")
    with pytest.raises(ConfigError, match=r"can't write .*missing/result\.json"):
        bench(arguments(trace, served.url, "--model", "fake", "--out", out))
