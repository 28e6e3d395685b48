"""Command lines are parsed into configurations, and configurations turned back into arguments."""

from __future__ import annotations

import argparse
import io
import logging
import subprocess
import sys
from pathlib import Path

import pytest

import mooncake_engine
from mooncake_engine.cli import build_parser, main
from mooncake_engine.config import EngineConfig, Role
from mooncake_engine.errors import ConfigError
from mooncake_engine.instance_arguments import (
    engine_argv,
    engine_config,
    kv_transfer_config,
    proxy_argv,
    role_argv,
)
from mooncake_engine.process.local_deployment import LocalDeployment
from mooncake_engine.process.progress_bar import ProgressBar
from mooncake_engine.speculative_config import SpeculativeConfig, SpeculativeMethod
from mooncake_hal.port_range import PortRange
from mooncake_kv.config import KVTransferConfig, LoadFailurePolicy
from mooncake_proxy.proxy_options import build_parser as build_proxy_parser


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def parse(*argv: str) -> argparse.Namespace:
    return build_parser().parse_args(argv)


def test_parser_has_options_only_for_the_named_command(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["generate", "--model", "m", "--max-tokens", "7", "hello"]
    assert build_parser(argv).parse_args(argv).max_tokens == 7
    with pytest.raises(SystemExit):
        build_parser(["generate"]).parse_args(["serve", "--model", "m"])
    with pytest.raises(SystemExit):
        build_parser([]).parse_args(["--help"])
    listed = capsys.readouterr().out
    assert all(name in listed for name in ("serve", "up", "bench", "collect-env"))


def test_option_defaults_equal_config_defaults(model: Path) -> None:
    args = parse("serve", "--model", str(model))
    assert engine_config(args, kv_transfer_config(args)) == EngineConfig(model=model)


def test_every_engine_option_reaches_the_config(model: Path) -> None:
    args = parse(
        *("serve", "--model", str(model), "--role", "prefill", "--backend", "cpu"),
        *("--served-model-name", "tiny", "--device", "1", "--dtype", "float32", "--tp-size", "2"),
        *("--pp-size", "3", "--block-size", "32", "--kv-layout", "packed", "--num-kv-blocks", "7"),
        *("--kv-cache-bytes", "1.5G", "--max-model-len", "100", "--max-num-seqs", "3"),
        *("--max-num-batched-tokens", "64", "--max-queued-requests", "5"),
        *("--no-prefix-caching", "--threads", "2", "--seed", "11"),
        *("--max-step-tokens-with-decodes", "48", "--target-tbt-ms", "12.5"),
        *("--min-prefill-chunk", "8", "--prefill-chunk-size", "16"),
    )
    kv_transfer = kv_transfer_config(args)
    assert engine_config(args, kv_transfer) == EngineConfig(
        model=model,
        served_model_name="tiny",
        role=Role.PREFILL,
        backend="cpu",
        device=1,
        dtype="float32",
        tp_size=2,
        pp_size=3,
        block_size=32,
        kv_layout="packed",
        num_kv_blocks=7,
        kv_cache_bytes=3 << 29,
        max_model_len=100,
        max_num_seqs=3,
        max_num_batched_tokens=64,
        max_queued_requests=5,
        prefix_caching=False,
        kv_transfer=KVTransferConfig(),
        threads=2,
        seed=11,
        max_step_tokens_with_decodes=48,
        target_tbt_ms=12.5,
        min_prefill_chunk=8,
        prefill_chunk_size=16,
    )


def test_every_transfer_option_reaches_the_config(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("open sesame, said Ali Baba\n")
    args = parse(
        *(
            "serve",
            "--model",
            "m",
            "--role",
            "decode",
            "--kv-connector",
            "MooncakeLayerwiseConnector",
        ),
        *("--kv-host", "10.0.0.1", "--kv-port", "5", "--transport", "shm", "--transport", "tcp"),
        *("--kv-secret-file", str(tmp_path / "secret"), "--lease-seconds", "3"),
        *("--transfer-timeout-seconds", "4", "--kv-load-failure", "fail"),
        *("--kv-advertise-host", "10.9.9.9", "--kv-port-range", "21000-21099"),
    )
    assert kv_transfer_config(args) == KVTransferConfig(
        connector="MooncakeLayerwiseConnector",
        host="10.0.0.1",
        port=5,
        advertise_host="10.9.9.9",
        port_range=PortRange(21_000, 21_099),
        transports=("shm", "tcp"),
        secret="open sesame, said Ali Baba",
        lease_s=3.0,
        transfer_timeout_s=4.0,
        load_failure=LoadFailurePolicy.FAIL,
    )


def test_invalid_port_range_is_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("serve", "--model", "m", "--kv-port-range", "21000..21099")
    assert "wanted a range of ports such as 14000-14099" in capsys.readouterr().err


def test_role_both_has_no_kv_transfer_without_a_connector() -> None:
    assert kv_transfer_config(parse("serve", "--model", "m")) is None
    with_connector = parse("serve", "--model", "m", "--kv-connector", "MooncakeConnector")
    assert kv_transfer_config(with_connector) == KVTransferConfig()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("\n", "is empty; put the deployment's secret there"),
        ("x\n", "a secret of 1 bytes, .* at least 16 are needed; openssl rand -hex 32 makes one"),
        ("fifteen letters", "a secret of 15 bytes"),
    ],
)
def test_guessable_secret_is_rejected(tmp_path: Path, text: str, problem: str) -> None:
    (tmp_path / "secret").write_text(text)
    args = parse(
        "serve", "--model", "m", "--role", "decode", "--kv-secret-file", str(tmp_path / "secret")
    )
    with pytest.raises(ConfigError, match=problem):
        kv_transfer_config(args)


@pytest.mark.parametrize("text", ["many", "5X", "G", ""])
def test_invalid_byte_count_is_rejected(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("serve", "--model", "m", "--kv-cache-bytes", text)
    assert "wanted bytes such as 512M or 4G" in capsys.readouterr().err


def test_instances_receive_only_non_default_options(model: Path) -> None:
    args = parse(
        *("up", "--model", str(model), "--block-size", "32", "--no-prefix-caching"),
        *("--threads", "3", "--kv-cache-bytes", "64M"),
    )
    argv = engine_argv(args)
    serve = parse("serve", *argv)
    assert engine_config(serve, None) == EngineConfig(
        model=model, block_size=32, prefix_caching=False, threads=3, kv_cache_bytes=64 << 20
    )
    assert "--max-num-seqs" not in argv


def test_role_arguments_apply_to_one_role(model: Path) -> None:
    args = parse(
        *("up", "--model", str(model), "--threads", "1", "--tp-size", "1"),
        *("--prefill-args", "--tp-size 2 --kv-port-range 14000-14009"),
        *("--decode-args=--enforce-eager",),
    )
    found = {
        role: parse("serve", "--role", role.value, *engine_argv(args), *role_argv(args, role))
        for role in (Role.PREFILL, Role.DECODE)
    }
    assert [serve.tp_size for serve in found.values()] == [2, 1]
    assert [serve.enforce_eager for serve in found.values()] == [False, True]
    assert all(serve.threads == 1 for serve in found.values())


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("--tp-size two", "argument --tp-size.*: invalid int value: 'two'; these are options of"),
        ("--role decode", "unrecognized arguments: --role decode"),
        ("--port 80", "unrecognized arguments: --port 80"),
        ("--kv-connector x", "unrecognized arguments: --kv-connector x"),
        ("--block-size 0", "block_size must be at least 1, got 0"),
        ("--lease-seconds=-1", r"--lease-seconds must be in \(0, 86400\], got -1"),
        ("--transfer-timeout-seconds 0", r"--transfer-timeout-seconds must be in \(0, 86400\]"),
        ("--push-timeout-seconds 0", r"--push-timeout-seconds must be in \(0, 86400\], got 0"),
        (
            "--early-pull-timeout-seconds 1e9",
            r"--early-pull-timeout-seconds must be in \(0, 86400\], got 1e\+09",
        ),
        ("--shutdown-timeout -1", "unrecognized|--shutdown-timeout must be|expected one argument"),
        ("--model 'x", "No closing quotation"),
    ],
)
def test_invalid_role_arguments_are_rejected_before_startup(
    words: str, problem: str, model: Path
) -> None:
    args = parse("up", "--model", str(model), f"--decode-args={words}")
    with pytest.raises(ConfigError, match=f"^--decode-args: .*({problem})"):
        role_argv(args, Role.DECODE)


def test_invalid_connector_is_rejected_before_startup(model: Path) -> None:
    with pytest.raises(ConfigError, match="can't be loaded from json:Nothing"):
        LocalDeployment("127.0.0.1", 0, 1, 1, (), connector="json:Nothing")
    args = parse("serve", "--model", str(model), "--role", "decode", "--kv-connector", "no.such:C")
    with pytest.raises(ConfigError, match="No module named 'no'"):
        kv_transfer_config(args)


@pytest.mark.parametrize(("sizes", "threads"), [([], 6), (["--tp-size", "2", "--dp-size", "3"], 1)])
def test_ranks_of_all_instances_divide_the_cpus(
    sizes: list[str], threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(24))
    args = parse("up", "--model", "m", "--prefill", "2", "--decode", "2", *sizes)
    assert parse("serve", *engine_argv(args)).threads == threads


def test_proxy_of_a_deployment_gets_what_concerns_its_clients() -> None:
    assert proxy_argv(parse("up", "--model", "m", "--tp-size", "2")) == ()
    limits = ("--allowed-origins", "https://a.com,https://b.com", "--max-body-bytes", "1048576")
    logs = ("--log-level", "debug", "--access-log", "all")
    proxied = proxy_argv(parse("up", "--model", "m", *limits, *logs))
    assert {*proxied} == {*limits, *logs}
    found = build_proxy_parser().parse_args(proxied)
    assert (found.access_log, found.max_body_bytes) == ("all", 1 << 20)
    given = parse("up", "--model", "m", *limits, "--proxy-args=--policy cost --api-key-file 'a b'")
    assert proxy_argv(given) == (*limits, "--policy", "cost", "--api-key-file", "a b")
    with pytest.raises(ConfigError, match=r"^--proxy-args: No closing quotation"):
        proxy_argv(parse("up", "--model", "m", "--proxy-args='a"))
    instance = parse("serve", *engine_argv(parse("up", "--model", "m", *limits)))
    assert instance.allowed_origins == ("https://a.com", "https://b.com")


@pytest.mark.parametrize(("prefill", "decode"), [(0, 1), (1, 0)])
def test_deployment_needs_prefill_and_decode_instances(prefill: int, decode: int) -> None:
    with pytest.raises(ConfigError, match="must be at least 1, got 0"):
        LocalDeployment("127.0.0.1", 0, prefill, decode, ())


@pytest.mark.parametrize("option", ["--prefill", "--decode", "--threads"])
@pytest.mark.parametrize("value", ["0", "-1", "two"])
def test_counts_below_one_are_rejected(
    option: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["up", "--model", "m", option, value])
    assert ended.value.code == 2
    assert (
        f"argument {option}: must be a number, at least 1, got {value!r}" in capsys.readouterr().err
    )


@pytest.mark.parametrize("command", ["serve", "up"])
def test_max_model_len_of_zero_is_rejected(
    command: str, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, "--model", str(model), "--max-model-len", "0"]) == 2
    assert "max_model_len must be at least 1, got 0" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["serve", "up"])
@pytest.mark.parametrize("url", ["nonsense", "collector:4318", "http://", "http://[::1", "ftp://c"])
def test_invalid_otlp_endpoint_is_rejected(
    command: str, url: str, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, "--model", str(model), "--otlp-endpoint", url]) == 2
    assert f"such as http://collector:4318, got {url!r}" in capsys.readouterr().err


def test_missing_model_prints_one_line_and_exits_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--model", "no/such/model"]) == 2
    assert capsys.readouterr().err == (
        "mooncake-engine: error: --model must be a Hugging Face model directory, a GGUF file, or "
        "ORG/NAME[@REVISION] of a hub: no config.json in no/such/model, which does not exist\n"
    )


def test_file_of_another_kind_is_not_reported_as_missing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "notes.txt"
    path.touch()
    assert main(["serve", "--model", str(path)]) == 2
    stderr = capsys.readouterr().err
    assert stderr.endswith(f"ORG/NAME[@REVISION] of a hub: {path} is a file of another kind\n")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_bar_uses_one_line_on_a_terminal() -> None:
    terminal = Terminal()
    bar = ProgressBar(terminal)
    bar("loading weights", 0.5)
    bar("loading weights", 1.0)
    assert terminal.getvalue().count("\n") == 1
    assert " 50 % loading weights" in terminal.getvalue()
    assert terminal.getvalue().endswith("100 % loading weights\n")


def test_progress_is_logged_once_per_quarter(caplog: pytest.LogCaptureFixture) -> None:
    bar = ProgressBar(io.StringIO())
    with caplog.at_level(logging.INFO):
        for percent in range(101):
            bar("loading weights", percent / 100)
    assert [record.getMessage() for record in caplog.records] == [
        f"loading weights: {percent} %" for percent in (0, 25, 50, 75, 100)
    ]


def test_public_names_are_imported_lazily() -> None:
    assert mooncake_engine.__all__ == ["LLM", "LLMEngine", "SamplingParams"]
    assert mooncake_engine.LLM.__name__ == "LLM"
    assert mooncake_engine.SamplingParams().n == 1
    with pytest.raises(AttributeError, match="has no attribute 'Nonsense'"):
        mooncake_engine.Nonsense  # noqa: B018
    program = (
        "import sys, mooncake_engine; print({'torch', 'starlette', 'msgspec'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert done.stdout.strip() == b"set()"


def test_speculative_method_options_reach_the_config(model: Path) -> None:
    asked = parse(
        *("serve", "--model", str(model), "--speculative-method", "draft"),
        *("--speculative-model", str(model), "--num-speculative-tokens", "3"),
        *("--speculative-disable-by-batch-size", "16"),
    )
    wanted = SpeculativeConfig(SpeculativeMethod.DRAFT, 3, model, disable_by_batch_size=16)
    assert engine_config(asked, None).speculative_config == wanted
    lookup = ("--prompt-lookup-min", "2", "--prompt-lookup-max", "4")
    asked = parse("serve", "--model", str(model), "--speculative-method", "ngram", *lookup)
    wanted = SpeculativeConfig(SpeculativeMethod.NGRAM, prompt_lookup_min=2, prompt_lookup_max=4)
    assert engine_config(asked, None).speculative_config == wanted


@pytest.mark.parametrize(
    ("given", "missing"),
    [
        (("--speculative-model", "{model}"), "--speculative-method draft"),
        (("--prompt-lookup-min", "2"), "--speculative-method ngram"),
        (("--num-speculative-tokens", "3"), "--speculative-method, one of ngram, draft"),
    ],
)
def test_draft_options_without_a_method_are_rejected(
    given: tuple[str, str], missing: str, model: Path
) -> None:
    options = [word.format(model=model) for word in given]
    with pytest.raises(ConfigError) as refused:
        engine_config(parse("serve", "--model", str(model), *options), None)
    assert str(refused.value).startswith(f"{given[0]} without --speculative-method")
    assert str(refused.value).endswith(f"add {missing}")


def test_missing_draft_model_is_named(model: Path) -> None:
    missing = ("--speculative-method", "draft", "--speculative-model", "nowhere")
    with pytest.raises(ConfigError, match=r"no config\.json in nowhere"):
        engine_config(parse("serve", "--model", str(model), *missing), None)


def test_all_instances_receive_the_speculative_options(model: Path) -> None:
    options = ("--speculative-method", "ngram", "--num-speculative-tokens", "6")
    args = parse("up", "--model", str(model), "--threads", "1", *options)
    assert engine_argv(args) == ("--model", str(model), "--threads", "1", *options)
