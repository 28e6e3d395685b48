"""Options of speculation, the ones that are rejected, and its memory use."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.byte_tokenizer import write_byte_tokenizer, write_fallback_tokenizer
from support.checkpoints import random_model, write_checkpoint

from mooncake_engine.assembly import build_engine
from mooncake_engine.config import EngineConfig, Role
from mooncake_engine.errors import ConfigError
from mooncake_engine.execution.engine_plan import make_plan
from mooncake_engine.speculative_config import SpeculativeConfig, SpeculativeMethod
from mooncake_hal.registry import Registry
from mooncake_kv.config import KVTransferConfig

DRAFT, NGRAM = SpeculativeMethod.DRAFT, SpeculativeMethod.NGRAM


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(random_model("llama"), tmp_path_factory.mktemp("llama"))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"method": NGRAM, "num_speculative_tokens": 0}, "at least 1, got 0"),
        ({"method": DRAFT}, "'draft' needs a draft model"),
        ({"method": NGRAM, "model": Path("x")}, "'ngram' uses no draft model, but x was given"),
        ({"method": DRAFT, "model": Path("x"), "prompt_lookup_min": 2}, "are for .* 'ngram'"),
        ({"method": NGRAM, "prompt_lookup_min": 4, "prompt_lookup_max": 3}, "got 4 and 3"),
        ({"method": NGRAM, "prompt_lookup_min": 0}, "got 0 and 0"),
    ],
)
def test_contradicting_options_are_rejected(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        SpeculativeConfig(**options)


def test_one_prompt_lookup_bound_sets_both() -> None:
    assert SpeculativeConfig(NGRAM).prompt_lookup == (2, 5)
    assert SpeculativeConfig(NGRAM, prompt_lookup_min=3).prompt_lookup == (3, 3)
    assert SpeculativeConfig(NGRAM, prompt_lookup_max=4).prompt_lookup == (4, 4)


def test_pipeline_stages_reject_speculation() -> None:
    with pytest.raises(ConfigError, match="pp_size 2"):
        EngineConfig(Path("x"), pp_size=2, speculative_config=SpeculativeConfig(NGRAM))


def test_prefill_instance_does_not_draft(model: Path) -> None:
    config = EngineConfig(
        model,
        role=Role.PREFILL,
        pp_size=2,
        kv_transfer=KVTransferConfig(),
        speculative_config=SpeculativeConfig(DRAFT, model=model),
    )
    assert config.speculation is None
    assert make_plan(config, Registry.discover().select_backend("cpu")).draft is None


def test_draft_model_with_other_vocabulary_size_is_rejected(model: Path, tmp_path: Path) -> None:
    other = write_checkpoint(random_model("llama", vocab_size=290), tmp_path)
    config = EngineConfig(model, speculative_config=SpeculativeConfig(DRAFT, model=other))
    with pytest.raises(ConfigError, match="has 290 tokens in its vocabulary, the model has 307"):
        build_engine(config)


def test_draft_model_with_other_token_ids_is_rejected(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("model", "same", "other")]
    for path in paths:
        path.mkdir()
        write_checkpoint(random_model("llama"), path)
    write_byte_tokenizer(paths[0])
    write_byte_tokenizer(paths[1], chat_template=None)
    write_fallback_tokenizer(paths[2])
    config = EngineConfig(
        paths[0], num_kv_blocks=8, speculative_config=SpeculativeConfig(DRAFT, model=paths[1])
    )
    build_engine(config).core.close()
    config = replace(config, speculative_config=SpeculativeConfig(DRAFT, model=paths[2]))
    with pytest.raises(ConfigError, match="has another vocabulary than the model"):
        build_engine(config)


def test_draft_models_kv_is_part_of_every_block(model: Path) -> None:
    backend = Registry.discover().select_backend("cpu")
    config = EngineConfig(model, kv_cache_bytes=6 << 20)
    alone = make_plan(config, backend)
    both = make_plan(
        replace(config, speculative_config=SpeculativeConfig(DRAFT, model=model)), backend
    )
    assert both.kv_cache_size.num_blocks == alone.kv_cache_size.num_blocks // 2
    assert both.kv_cache_size.num_host_blocks >= both.kv_cache_size.num_blocks


@pytest.mark.parametrize("method", [NGRAM, DRAFT])
def test_profiling_run_includes_draft_memory(model: Path, method: SpeculativeMethod) -> None:
    """The pool is sized by a share of the host's memory; its pages are never touched."""
    speculation = SpeculativeConfig(method, model=model if method is DRAFT else None)
    config = EngineConfig(
        model, memory_utilization=0.2, max_num_seqs=8, speculative_config=speculation
    )
    engine = build_engine(config)
    try:
        assert engine.info.num_kv_blocks > 0
    finally:
        engine.core.close()
