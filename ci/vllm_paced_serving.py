"""Options for vLLM with a simulated device, and the model for it, which has KV and no weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from vllm_environment import CACHE, ROOT
from vllm_serving import EXAMPLE

MODEL = CACHE / "paced-model"
KV_OF_MODEL = {"num_hidden_layers": 28, "num_key_value_heads": 4, "head_dim": 128}
"""The KV shape of Qwen2.5-7B: 56 KiB per token in bf16."""
REST_OF_MODEL = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4}
WORKER = ("--worker-cls", "vllm_paced_worker.PacedWorker")
OF_MODEL = (
    *("--served-model-name", "tiny", "--dtype", "bfloat16", "--load-format", "dummy"),
    *("--enforce-eager", "--max-model-len", "2048", "--max-num-batched-tokens", "8192"),
)
"""Options of ``vllm serve``, with steps as large as vLLM's on an H200."""
UNBOUND = "nobind"
"""Used in place of cores, for workers that compute almost nothing."""
VARIABLES = {"VLLM_CPU_KVCACHE_SPACE": "2", "OMP_NUM_THREADS": "1"}
"""KV memory for somewhat more than 16 requests of 2,048 tokens."""
FOLDER = ROOT / "ci"
"""Folder in which vLLM finds the worker and the plugin."""


def prepare_model() -> Path:
    """Create the example model with a large model's KV and without weights; returns its folder."""
    MODEL.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(EXAMPLE / name, MODEL)
    config = json.loads((EXAMPLE / "config.json").read_text()) | KV_OF_MODEL | REST_OF_MODEL
    (MODEL / "config.json").write_text(json.dumps(config))
    return MODEL
