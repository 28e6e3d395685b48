"""Every architecture agrees with transformers: identical greedy tokens, logits within float32
rounding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints import random_model, write_checkpoint
from support.stepping import RunningRequest, Stepper
from transformers import PreTrainedModel

from mooncake_engine.config import EngineConfig
from mooncake_engine.execution.engine_plan import make_plan
from mooncake_engine.execution.executor import InProcessExecutor
from mooncake_engine.sampling_params import SamplingParams
from mooncake_hal.registry import Registry

PROMPT_LENGTHS = (1, 5, 16, 17, 33, 130)
NEW_TOKENS = 12
LONGEST = max(PROMPT_LENGTHS) + NEW_TOKENS - 1
"""Tokens of the longest sequence, whose last token attends to a sliding window of the same size."""

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 6.0}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.05 * i for i in range(3)],
    "long_factor": [1.5 + 0.7 * i for i in range(3)],
    "partial_rotary_factor": 0.75,
}
LONG = {**LONGROPE, "original_max_position_embeddings": 1, "attention_factor": 1.19}
"""Transformers uses the long factors from the second token on, the engine from the first."""
DEEPSEEK_YARN = {**YARN, "factor": 40.0, "mscale": 0.707, "mscale_all_dim": 1.2}
PUBLISHED_WIDTHS = {
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
}

CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"num_key_value_heads": 1}),
    ("llama", {"num_key_value_heads": 2, "tie_word_embeddings": True}),
    ("llama", {"num_key_value_heads": 4, "vocab_size": 1009, "rope_parameters": LLAMA3}),
    ("llama", {"num_key_value_heads": 8, "rope_parameters": LINEAR}),
    ("llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 8}),
    ("llama", {"rope_parameters": YARN}),
    ("llama", {"rope_parameters": DYNAMIC}),
    ("phi3", {"num_key_value_heads": 8}),
    ("phi3", {"rope_parameters": LONGROPE, "tie_word_embeddings": True}),
    ("phi3", {"rope_parameters": LONG, "original_max_position_embeddings": 1}),
    ("qwen2", {"num_key_value_heads": 2, "tie_word_embeddings": True}),
    ("qwen2", {"num_key_value_heads": 4, "rope_parameters": YARN}),
    ("qwen2", {"num_key_value_heads": 8, "vocab_size": 301}),
    ("qwen3", {"num_key_value_heads": 1, "head_dim": 32}),
    ("qwen3", {"num_key_value_heads": 2, "tie_word_embeddings": True, "attention_bias": True}),
    ("qwen3", {"num_key_value_heads": 8}),
    ("mistral", {"sliding_window": None, "head_dim": 24}),
    ("mistral", {"sliding_window": LONGEST}),
    ("phi3", {"sliding_window": LONGEST}),
    ("mixtral", {"sliding_window": LONGEST}),
    ("seed_oss", {"attention_out_bias": True, "mlp_bias": True}),
    ("mixtral", {}),
    ("mixtral", {"num_experts_per_tok": 1, "num_local_experts": 3}),
    ("qwen3_moe", {"norm_topk_prob": True}),
    ("qwen3_moe", {"num_experts_per_tok": 8, "attention_bias": True}),
    ("qwen3_moe", {"mlp_only_layers": [1], "tie_word_embeddings": True}),
    ("qwen3_moe", {"decoder_sparse_step": 2}),
    ("deepseek_v2", {"q_lora_rank": None}),
    ("deepseek_v2", {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}),
    ("deepseek_v2", {"rope_parameters": DEEPSEEK_YARN, "attention_bias": True}),
    ("deepseek_v3", {}),
    ("deepseek_v3", PUBLISHED_WIDTHS),
    ("deepseek_v3", {"q_lora_rank": None, "rope_interleave": False, "norm_topk_prob": False}),
    (
        "deepseek_v3",
        {"rope_parameters": DEEPSEEK_YARN, "attention_bias": True, "n_group": 1, "topk_group": 1},
    ),
]


def prompts(vocab_size: int) -> list[tuple[int, ...]]:
    generator = torch.Generator().manual_seed(7)
    return [
        tuple(torch.randint(0, vocab_size, (length,), generator=generator).tolist())
        for length in PROMPT_LENGTHS
    ]


@torch.inference_mode()
def expected_answer(
    model: PreTrainedModel, prompt: tuple[int, ...]
) -> tuple[list[int], list[float]]:
    """Greedy tokens and their log probabilities, by recomputing the whole sequence for each
    token."""
    tokens, logprobs = list(prompt), []
    for _ in range(NEW_TOKENS):
        last = model(torch.tensor([tokens])).logits[0, -1].float().log_softmax(-1)
        tokens.append(int(last.argmax()))
        logprobs.append(float(last[tokens[-1]]))
    return tokens[len(prompt) :], logprobs


def run(config: EngineConfig, chunk: int, vocab_size: int) -> list[RunningRequest]:
    """Run all prompts as one batch."""
    sampling = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, logprobs=2)
    requests = [
        RunningRequest(f"r{index}", prompt, sampling)
        for index, prompt in enumerate(prompts(vocab_size))
    ]
    executor = InProcessExecutor(
        make_plan(config, Registry.discover().select_backend("cpu")),
        Registry.discover().select_backend("cpu"),
    )
    try:
        Stepper(executor, chunk).generate(requests)
    finally:
        executor.close()
    return requests


@pytest.mark.parametrize(("family", "overrides"), CASES, ids=lambda value: str(value)[:60])
def test_greedy_tokens_and_logprobs_match_transformers(
    family: str, overrides: dict[str, Any], tmp_path: Path
) -> None:
    model = random_model(family, **overrides)
    config = EngineConfig(write_checkpoint(model, tmp_path), num_kv_blocks=64)
    vocab_size = model.config.vocab_size
    for request in run(config, 48, vocab_size):
        tokens, logprobs = expected_answer(model, request.prompt)
        assert request.output == tokens
        found = [token.logprobs.logprob for token in request.sampled if token.logprobs]
        assert found == pytest.approx(logprobs, abs=2e-4)
