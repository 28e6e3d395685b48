"""Random models for speed measurements: the bytes that a step reads, and their checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.speed_models import (
    LLAMA_8B,
    SHAPE_VARIABLE,
    TINY,
    chosen_shape,
    random_llama,
    read_rate,
    written_checkpoint,
)
from transformers import AutoConfig, AutoTokenizer

from mooncake_hal.testing.backends import load_backend


def test_bytes_of_step_equal_weights() -> None:
    """Norms are left out: 0.003 % of 8 B."""
    model = random_llama(TINY, torch.device("cpu"))
    read = [p for name, p in model.named_parameters() if "embed" not in name and "norm" not in name]
    assert TINY.weight_bytes == sum(2 * weight.numel() for weight in read)
    assert {weight.dtype for weight in read} == {torch.bfloat16}
    assert TINY.weight_bytes != LLAMA_8B.weight_bytes == 15_009_316_864


def test_step_time_equals_reading_weights_and_kv() -> None:
    assert LLAMA_8B.token_bytes == 32 * 8 * 128 * 2 * 2
    seconds = LLAMA_8B.step_seconds(4e12, 32, 1024)
    assert seconds == pytest.approx((15_009_316_864 + 32 * 1024 * 131072) / 4e12)


def test_checkpoint_is_written_once(tmp_path: Path) -> None:
    directory = written_checkpoint(TINY, "cpu", tmp_path)
    assert list(tmp_path.iterdir()) == [directory]
    written = (directory / "config.json").stat().st_mtime_ns
    assert written_checkpoint(TINY, "cpu", tmp_path) == directory
    assert (directory / "config.json").stat().st_mtime_ns == written
    assert AutoConfig.from_pretrained(directory).vocab_size == TINY.fields["vocab_size"]
    tokenizer = AutoTokenizer.from_pretrained(directory)
    assert tokenizer.decode([72, 105, 300, 2047]) == "Hi w300 w2047"
    assert tokenizer.convert_tokens_to_ids("<|eos|>") == 256


def test_failed_write_leaves_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="ended with status 1"):
        written_checkpoint(TINY, "none-such", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_shape_is_read_from_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SHAPE_VARIABLE, raising=False)
    assert chosen_shape() is LLAMA_8B
    monkeypatch.setenv(SHAPE_VARIABLE, "tiny")
    assert chosen_shape() is TINY
    monkeypatch.setenv(SHAPE_VARIABLE, "huge")
    with pytest.raises(ValueError, match="no such shape; there are llama3-8b, tiny"):
        chosen_shape()


def test_device_read_bandwidth_is_measured() -> None:
    assert read_rate(load_backend("cpu"), 1 << 20) > 1e6
