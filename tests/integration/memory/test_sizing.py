"""The KV cache gets the memory that weights and the largest step leave within the limit."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from support.checkpoints import random_model, write_checkpoint

from mooncake_engine.assembly import build_engine
from mooncake_engine.config import EngineConfig
from mooncake_engine.errors import ConfigError
from mooncake_engine.messages import EngineInfo
from mooncake_hal.registry import Registry

MIB = 1 << 20


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(random_model("llama"), tmp_path_factory.mktemp("llama"))


def info_of(config: EngineConfig) -> EngineInfo:
    engine = build_engine(config)
    engine.core.close()
    return engine.info


def utilization(extra_bytes: int, num_processes: int = 1) -> float:
    """The utilization that allows this many bytes beyond the memory that the process uses now."""
    runtime = Registry.discover().select_backend("cpu").runtime
    runtime.reset_peak(0)
    wanted = num_processes * (runtime.peak_bytes(0) + extra_bytes)
    return wanted / runtime.memory_info(0).total_bytes


def test_remaining_memory_goes_to_kv_and_is_logged(
    checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = {"max_num_batched_tokens": 512, "max_num_seqs": 32, "threads": 1}
    config = EngineConfig(checkpoint, memory_utilization=utilization(256 * MIB), **options)  # type: ignore[arg-type]  # fields by name
    with caplog.at_level(logging.INFO):
        facts = info_of(config)
    block_bytes = 3 * 2 * 2 * 16 * 16 * 4  # layers, planes, heads, tokens, dim, float32
    nbytes = facts.num_kv_blocks * block_bytes
    assert 16 * MIB < nbytes <= 256 * MIB
    assert facts.max_model_len == 512
    words = " ".join(record.getMessage() for record in caplog.records)
    assert "the largest step take" in words
    assert f"{facts.num_kv_blocks} blocks of 16 tokens, {facts.num_kv_blocks * 16} tokens" in words


def test_ranks_agree_on_pool_size(checkpoint: Path) -> None:
    share = min(1.0, utilization(600 * MIB, num_processes=2))
    config = EngineConfig(checkpoint, memory_utilization=share, tp_size=2, threads=1)
    assert info_of(config).num_kv_blocks > 0


def test_too_little_memory_is_rejected_with_amounts(checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match=r"memory_utilization 0\.001 allows .* GiB, but weights"):
        info_of(EngineConfig(checkpoint, memory_utilization=0.001, threads=1))


def test_host_memory_is_not_filled_by_default(checkpoint: Path) -> None:
    facts = info_of(EngineConfig(checkpoint, threads=1))
    assert facts.num_kv_blocks * 3 * 2 * 2 * 16 * 16 * 4 <= 1 << 30


def test_kv_cache_smaller_than_context_length_is_logged_once(
    checkpoint: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    config = EngineConfig(checkpoint, num_kv_blocks=1, tp_size=2, threads=1)
    assert info_of(config).max_model_len == 16
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    [warning] = [
        line for line in warnings if "limits prompt and output together to 16 tokens" in line
    ]
    assert "the model supports 512: enlarge it (--kv-cache-bytes, " in warning
    assert "limit" not in capfd.readouterr().err, "ranks log nothing about it"


def test_kv_cache_that_fits_configured_length_logs_no_warning(
    checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # no swap space, since a host with little free memory would reduce it
    options = {"num_kv_blocks": 1, "swap_space_bytes": 0}
    config = EngineConfig(checkpoint, max_model_len=16, threads=1, **options)
    assert info_of(config).max_model_len == 16
    assert not [record for record in caplog.records if record.levelname == "WARNING"]
