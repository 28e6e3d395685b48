"""How vLLM is started where its device is pretended, and the model it has there: nothing but KV."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from vllm_environment import CACHE, ROOT
from vllm_serving import EXAMPLE

MODEL = CACHE / "paced-model"
KV_OF_MODEL = {"num_hidden_layers": 28, "num_key_value_heads": 4, "head_dim": 128}
"""Qwen2.5-7B's: 56 KiB a token in bf16."""
REST_OF_MODEL = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4}
WORKER = ("--worker-cls", "vllm_paced_worker.PacedWorker")
OF_MODEL = (
    *("--served-model-name", "tiny", "--dtype", "bfloat16", "--load-format", "dummy"),
    *("--enforce-eager", "--max-model-len", "2048", "--max-num-batched-tokens", "8192"),
)
"""Steps as large as vLLM makes them on an H200."""
UNBOUND = "nobind"
"""In place of cores for workers that compute next to nothing."""
VARIABLES = {"VLLM_CPU_KVCACHE_SPACE": "2", "OMP_NUM_THREADS": "1"}
"""KV for 16 requests of 2,048 tokens, and some."""
FOLDER = ROOT / "ci"
"""Where vLLM finds the worker and the plugin."""


def prepare_model() -> Path:
    """The example with a large model's KV, and without weights."""
    MODEL.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(EXAMPLE / name, MODEL)
    config = json.loads((EXAMPLE / "config.json").read_text()) | KV_OF_MODEL | REST_OF_MODEL
    (MODEL / "config.json").write_text(json.dumps(config))
    return MODEL
