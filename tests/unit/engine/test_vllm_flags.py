"""``vllm serve`` command lines: flags are translated, ignored with a warning, or rejected."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from mooncake_engine.cli import build_parser, main
from mooncake_engine.config_file import with_config
from mooncake_engine.errors import ConfigError
from mooncake_engine.instance_arguments import engine_config
from mooncake_engine.vllm_flags import with_model_flag, without_vllm_flags

TINY = "examples/tiny-llama"


def test_vllm_command_line_gives_the_same_config() -> None:
    theirs = with_model_flag(
        (
            *("serve", TINY, "--tensor-parallel-size", "2", "-pp", "3", "--max-model-len", "100"),
            *("--gpu-memory-utilization", "0.8", "--dtype", "half", "--max-num-seqs", "7"),
            *("--num-gpu-blocks-override", "64", "--no-enable-prefix-caching", "--seed", "3"),
            *("--served-model-name", "tiny", "--block-size", "32", "--enforce-eager"),
        ),
        ("serve",),
    )
    ours = (
        *("serve", "--model", TINY, "--tp-size", "2", "--pp-size", "3", "--max-model-len", "100"),
        *("--memory-utilization", "0.8", "--dtype", "float16", "--max-num-seqs", "7"),
        *("--num-kv-blocks", "64", "--no-prefix-caching", "--seed", "3"),
        *("--served-model-name", "tiny", "--block-size", "32", "--enforce-eager"),
    )
    parser = build_parser()
    found, wanted = (engine_config(parser.parse_args(line), None) for line in (theirs, ours))
    assert found == wanted
    assert (found.tp_size, found.pp_size, found.dtype) == (2, 3, "float16")


def test_config_file_accepts_vllm_names(tmp_path: Path) -> None:
    from mooncake_engine.cli import OPTIONS

    file = tmp_path / "vllm.yaml"
    file.write_text("tensor-parallel-size: 2\ngpu_memory_utilization: 0.8\n")
    found = with_config(["serve", "--config", str(file)], OPTIONS)
    assert found[1:5] == ["--tp-size", "2", "--memory-utilization", "0.8"]


def test_config_file_of_vllm_is_treated_as_its_flags(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from mooncake_engine.cli import OPTIONS

    file = tmp_path / "vllm.yaml"
    file.write_text(
        "enable-prefix-caching: true\ndisable_log_requests: true\nmax-logprobs: 5\n"
        "enable-lora: false\nrevision: null\n"
    )
    _, *words = with_config(["serve", "--config", str(file)], OPTIONS)
    assert without_vllm_flags(words) == ["--config", str(file)]
    file.write_text("enable-prefix-caching: false")
    assert with_config(["serve", "--config", str(file)], OPTIONS)[1] == "--no-prefix-caching"
    file.write_text("enable-lora: true")
    assert main(["serve", TINY, "--config", str(file)]) == 2
    assert "use instead: a checkpoint with the adapter merged" in capsys.readouterr().err


def test_only_the_first_positional_argument_is_the_model() -> None:
    assert with_model_flag(["serve", "a/b"], ("serve",)) == ["serve", "--model", "a/b"]
    for argv in (["serve"], ["serve", "--model", "a"], ["generate", "hi"]):
        assert with_model_flag(argv, ("serve",)) == argv


def test_flags_without_effect_are_ignored_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    given = ["--enable-chunked-prefill", "--max-logprobs", "5", "--uvicorn-log-level=debug", "-x"]
    given += ["--disable-log-stats", "--attention-backend", "FLASH_ATTN"]
    with caplog.at_level(logging.WARNING):
        assert without_vllm_flags(given) == ["-x"]
    assert [record.getMessage() for record in caplog.records] == [
        "--enable-chunked-prefill has no effect: long prompts run in chunks",
        "--max-logprobs has no effect: up to 128 are supported",
        "--uvicorn-log-level has no effect: see --log-level",
        "--disable-log-stats has no effect: see --log-stats-interval",
        "--attention-backend has no effect: kernels are the backend's own",
    ]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--kv-transfer-config", "{}"], "is an option of vLLM; use instead: --role pref"),
        (["--revision=v1"], "--revision is an option of vLLM; use instead: --model ORG/NAME@"),
        (["--trust-remote-code"], "a checkpoint's code is never run"),
        (["--kv-cache-memory-bytes", "4G"], "use instead: --kv-cache-bytes$"),
        (["--data-parallel-rank=1"], "--dp-size; over several hosts with --nnodes"),
    ],
)
def test_unsupported_flags_are_rejected_with_an_alternative(argv: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        without_vllm_flags(argv)


def test_rejected_flag_prints_one_line_and_exits_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", TINY, "--task", "generate"]) == 2
    assert capsys.readouterr().err == (
        "mooncake-engine: error: --task is an option of vLLM; use instead: no option: only "
        "generation is served\n"
    )


def test_flag_that_begins_an_option_of_ours_is_not_taken_for_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As ``--api-key-file`` its error would show the key."""
    assert main(["serve", TINY, "--api-key", "sk-secret"]) == 2
    assert capsys.readouterr().err == (
        "mooncake-engine: error: --api-key is an option of vLLM; use instead: --api-key-file FILE, "
        "which does not show the key in process lists; with up, "
        "--proxy-args='--api-key-file FILE'\n"
    )


@pytest.mark.parametrize("flag", ["--quantization", "-q"])
def test_quantization_flag_is_translated(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The CPU backend then rejects fp8."""
    assert main(["serve", TINY, flag, "fp8", "--backend", "cpu"]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == (
        "mooncake-engine: error: quantization 'fp8' was requested, backend 'cpu' does not support "
        "linear layers in fp8 on this device: leave it out, or use another backend or device"
    )
