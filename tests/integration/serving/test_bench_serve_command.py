"""``mooncake-engine bench serve`` against real servers, with the command lines of vLLM's docs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.fake_engine import FakeEngine
from support.programs import TINY_LLAMA

from mooncake_engine.cli import main
from mooncake_engine.errors import Overloaded

# The keys of vLLM's result file (vllm/benchmarks/serve.py), with --save-detailed.
VLLM_KEYS = {
    *("date", "endpoint_type", "backend", "label", "model_id", "tokenizer_id", "num_prompts"),
    *("request_rate", "burstiness", "max_concurrency", "duration", "completed", "failed"),
    *("total_input_tokens", "total_output_tokens", "request_throughput", "request_goodput"),
    *("output_throughput", "total_token_throughput", "input_lens", "output_lens", "ttfts", "itls"),
    *("start_times", "generated_texts", "errors", "max_output_tokens_per_s"),
    "max_concurrent_requests",
    *(f"{figure}_{metric}_ms" for metric in ("ttft", "tpot", "itl")
      for figure in ("mean", "median", "std", "p99")),
}  # fmt: skip


def run(url: str, folder: Path, *options: str) -> dict[str, Any]:
    """Run the command; returns its result file."""
    out = ("--save-result", "--result-dir", str(folder), "--result-filename", "out.json")
    assert main(["bench", "serve", "--base-url", url, *out, *options]) == 0
    found: dict[str, Any] = json.loads((folder / "out.json").read_text())
    return found


def test_vllm_example_runs_against_engine(
    tiny_llama_pair_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = run(
        *(tiny_llama_pair_url, tmp_path, "--backend", "vllm", "--endpoint", "/v1/completions"),
        *("--model", str(TINY_LLAMA), "--served-model-name", "tiny-llama"),
        *("--dataset-name", "random", "--random-input-len", "48", "--random-output-len", "6"),
        *("--num-prompts", "5", "--request-rate", "50", "--burstiness", "2", "--save-detailed"),
        *("--goodput", "ttft:60000", "tpot:60000", "--metadata", "tp=1", "--max-concurrency", "3"),
    )
    assert found.keys() >= VLLM_KEYS
    assert (found["completed"], found["failed"], found["tp"]) == (5, 0, "1")
    assert found["output_lens"] == [6] * 5, "answers run to their full length"
    assert found["input_lens"] == [48] * 5
    assert found["request_goodput"] == pytest.approx(found["request_throughput"])
    assert found["max_concurrent_requests"] <= 3
    assert "Mean TTFT (ms):" in capsys.readouterr().out


def test_answers_without_usage_are_counted_by_their_text(served: Any, tmp_path: Path) -> None:
    options = ("--tokenizer", str(TINY_LLAMA), "--num-prompts", "2", "--input-len", "20")
    reported = run(served.url, tmp_path, *options, "--output-len", "3", "--save-detailed")
    silent = ("--extra-body", '{"stream_options": {"include_usage": false}}')
    counted = run(served.url, tmp_path, *options, "--output-len", "3", "--save-detailed", *silent)
    assert counted["generated_texts"] == reported["generated_texts"]
    assert counted["input_lens"] == [20, 20]
    assert min(counted["output_lens"]) > 0
    assert counted["total_output_tokens"] == sum(counted["output_lens"])


def test_requests_beyond_the_descriptor_limit_of_the_shell(served: Any) -> None:
    words = [sys.executable, "-m", "mooncake_engine", "bench", "serve", "--base-url", served.url]
    words += ["--tokenizer", str(TINY_LLAMA), "--num-prompts", "150"]
    words += ["--input-len", "8", "--output-len", "3"]
    ended = subprocess.run(
        ["prlimit", "--nofile=64:1024", *words], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert ["Successful", "requests:", "150"] in map(str.split, ended.stdout.splitlines())


def test_model_defaults_to_first_of_endpoint(served: Any, tmp_path: Path) -> None:
    found = run(
        *(served.url, tmp_path, "--tokenizer", str(TINY_LLAMA), "--num-prompts", "2"),
        *("--input-len", "20", "--output-len", "3", "--temperature", "0.5", "--num-warmups", "2"),
        *("--ready-check-timeout-sec", "5"),
    )
    assert (found["model_id"], found["completed"]) == ("fake", 2)
    assert "itls" not in found, "details only if requested"
    engine: FakeEngine = served.engine
    assert len(engine.seen) == 5, "one to see that it is ready, two to warm up"
    assert {request.sampling.temperature for request in engine.seen} == {0.5}


def test_chat_and_custom_prompts(served: Any, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "good morning"}\n{"prompt": "good evening"}\n')
    found = run(
        *(served.url, tmp_path, "--backend", "openai-chat", "--tokenizer", str(TINY_LLAMA)),
        *("--dataset-name", "custom", "--dataset-path", str(prompts), "--num-prompts", "2"),
        *("--save-detailed", "--disable-shuffle", "--custom-output-len", "60"),
        *("--endpoint", "/v1/chat/completions", "--percentile-metrics", "e2el"),
        *("--metric-percentiles", "50,90"),
    )
    texts = found["generated_texts"]
    assert "MORNING" in texts[0]
    assert "EVENING" in texts[1]
    assert {"p50_e2el_ms", "p90_e2el_ms"} <= found.keys()
    assert "mean_ttft_ms" not in found


def test_results_are_appended_and_named(served: Any, tmp_path: Path) -> None:
    options = ("--tokenizer", str(TINY_LLAMA), "--num-prompts", "1", "--input-len", "8")
    options = (*options, "--output-len", "3")
    folder = tmp_path / "new"
    for _ in range(2):
        argv = ["bench", "serve", "--base-url", served.url, *options, "--result-dir", str(folder)]
        assert main([*argv, "--append-result", "--result-filename", "all.jsonl"]) == 0
    lines = (folder / "all.jsonl").read_text().splitlines()
    assert [json.loads(line)["completed"] for line in lines] == [1, 1]
    assert main([*argv, "--save-result", "--label", "mine", "--max-concurrency", "2"]) == 0
    names = [path.name for path in folder.iterdir() if path.name != "all.jsonl"]
    assert len(names) == 1
    assert names[0].startswith("mine-infqps-concurrency2-fake-")


def test_figures_of_a_run_outlive_a_full_disk(
    served: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "all.jsonl").symlink_to("/dev/full")
    argv = ["bench", "serve", "--base-url", served.url, "--tokenizer", str(TINY_LLAMA)]
    argv += ["--num-prompts", "1", "--input-len", "8", "--output-len", "3"]
    argv += ["--append-result", "--result-dir", str(tmp_path), "--result-filename", "all.jsonl"]
    assert main(argv) == 1
    stderr = capsys.readouterr().err
    assert "all.jsonl: No space left on device; the run's figures were" in stderr
    assert "Mean TTFT (ms):" in stderr


def test_failures_are_counted_and_total_failure_is_an_error(
    served: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    served.engine.refusal = Overloaded("too many")
    argv = ["bench", "serve", "--base-url", served.url, "--tokenizer", str(TINY_LLAMA)]
    assert main([*argv, "--num-prompts", "2", "--input-len", "8"]) == 1
    assert "all requests failed; the first with: status 429" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--backend", "openai-chat", "--endpoint", "/v1/completions"), "does not match --backend"),
        (("--goodput", "ttft"), "'ttft' must be KEY:VALUE"),
        (("--goodput", "ttft:fast"), "take numbers"),
        (("--header", "nothing"), "'nothing' must be KEY=VALUE"),
        (("--request-rate", "0"), "--request-rate must be more than 0"),
        (("--tokenizer", "none"), "must be a model directory"),
        (("--base-url", "ftp://host"), "--url must be http"),
    ],
)
def test_invalid_options_are_rejected_before_any_request(
    served: Any, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], words: str
) -> None:
    argv = ["bench", "serve", "--base-url", served.url, "--model", "fake"]
    tokenizer = () if "--tokenizer" in options else ("--tokenizer", str(TINY_LLAMA))
    assert main([*argv, *tokenizer, *options]) == 2
    assert words in capsys.readouterr().err
    assert served.engine.seen == []


def test_bench_serve_imports_no_torch() -> None:
    code = (
        "import sys, mooncake_engine.cli, mooncake_engine.replay.serving_command as command\n"
        "assert not {'torch', 'numpy', 'transformers', 'tokenizers'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
