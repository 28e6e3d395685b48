"""Random models for speed measurements, created where they run: nothing is downloaded.

Speed does not depend on the weights' values. A checkpoint is written once and kept for later runs.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from support.byte_tokenizer import write_byte_tokenizer
from support.programs import REPOSITORY
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from mooncake_hal.backend import Backend
from mooncake_hal.testing.backends import load_backend

SHAPE_VARIABLE = "MOONCAKE_SERVING_SHAPE"
FOLDER = REPOSITORY / ".cache" / "random-models"
COPY_ROUNDS, COPIES = 5, 16


@dataclass(frozen=True)
class SpeedShape:
    """A random Llama in bfloat16, and the size of the load.

    Args:
        name: of the shape, and of its folder.
        fields: of the config.
        length_divisor: divides the lengths of prompts and outputs.
        copy_bytes: size of the copy that the device's bandwidth is measured with.
    """

    name: str
    fields: Mapping[str, Any]
    length_divisor: int = 1
    copy_bytes: int = 1 << 30

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's keys and values in all layers."""
        shape = self.fields
        head_dim = shape["hidden_size"] // shape["num_attention_heads"]
        return 4 * int(shape["num_hidden_layers"] * shape["num_key_value_heads"] * head_dim)

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that a decode step reads: all but the embeddings (it looks up rows)."""
        shape = self.fields
        hidden, kv_heads = shape["hidden_size"], shape["num_key_value_heads"]
        keys_values = 2 * kv_heads * (hidden // shape["num_attention_heads"])
        a_layer = 2 * hidden + keys_values + 3 * shape["intermediate_size"]
        return 2 * int(hidden * (shape["num_hidden_layers"] * a_layer + shape["vocab_size"]))

    def length(self, tokens: int) -> int:
        """Scaled length of a prompt or an output."""
        return max(4, tokens // self.length_divisor)

    def step_seconds(self, bytes_per_s: float, rows: int, context: int) -> float:
        """Lower bound of a decode step's time: reading weights and KV."""
        return (self.weight_bytes + rows * context * self.token_bytes) / bytes_per_s


LLAMA_8B = SpeedShape(
    "llama3-8b",
    {
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 8192,
    },
)
TINY = SpeedShape(
    "tiny",
    {
        "vocab_size": 2048,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
    },
    length_divisor=8,
    copy_bytes=1 << 20,
)
"""To try the code on a CPU; its figures mean nothing."""
SHAPES = {shape.name: shape for shape in (LLAMA_8B, TINY)}


def chosen_shape() -> SpeedShape:
    """The shape that the environment names; by default 8 B.

    Raises:
        ValueError: there is no such shape.
    """
    name = os.environ.get(SHAPE_VARIABLE, LLAMA_8B.name)
    if name not in SHAPES:
        raise ValueError(f"{SHAPE_VARIABLE}={name}: no such shape; there are {', '.join(SHAPES)}")
    return SHAPES[name]


def random_llama(shape: SpeedShape, device: torch.device) -> PreTrainedModel:
    """A model with random weights, created on the device."""
    with torch.device(device):
        config = LlamaConfig(**shape.fields)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return model.eval()


def written_checkpoint(shape: SpeedShape, backend: str, folder: Path = FOLDER) -> Path:
    """A random checkpoint with a tokenizer, created unless it exists; returns its directory.

    A separate process creates it on the backend's first device, so that the device's memory is free
    afterwards.
    """
    directory = folder / shape.name
    if directory.exists():
        return directory
    started = time.monotonic()
    unfinished = folder / f"{shape.name}.{os.getpid()}"
    context = multiprocessing.get_context("spawn")
    writer = context.Process(target=_write, args=(shape, backend, unfinished))
    writer.start()
    writer.join()
    try:
        assert writer.exitcode == 0, f"writing {directory} ended with status {writer.exitcode}"
        unfinished.rename(directory)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    print(f"random {shape.name} in {directory}: {time.monotonic() - started:.0f} s")
    return directory


def _write(shape: SpeedShape, backend: str, directory: Path) -> None:
    runtime = load_backend(backend).runtime
    runtime.bind_thread(0)
    random_llama(shape, runtime.device(0)).save_pretrained(directory)
    write_byte_tokenizer(directory, vocab_size=shape.fields["vocab_size"])


def read_rate(backend: Backend, nbytes: int) -> float:
    """Bytes per second that the first device can read, measured with copies of this size inside it.
    A copy reads and writes, so it moves twice its size."""
    runtime = backend.runtime
    runtime.bind_thread(0)
    device = runtime.device(0)
    source, target = (torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(2))
    times = []
    for _ in range(1 + COPY_ROUNDS):
        runtime.synchronize(0)
        started = time.perf_counter()
        for _ in range(COPIES):
            target.copy_(source)
        runtime.synchronize(0)
        times.append(time.perf_counter() - started)
    return 2 * nbytes * COPIES / min(times[1:])
