"""The time that a KV transfer adds to the first and to the second token, over HTTP."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import httpx
import numpy as np
import pytest
from support.checkpoints import random_model, write_checkpoint
from support.figures import Figure, record
from support.running import deployment, serving

PROMPT_TOKENS = 512
ROUNDS = 15
SHAPE = {
    "vocab_size": 32000,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 10,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}
"""About 100 million parameters."""

KV_BYTES = PROMPT_TOKENS * 10 * 2 * 4 * 64 * 2


@pytest.fixture(scope="module")
def urls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    folder = tmp_path_factory.mktemp("ttft")
    model = write_checkpoint(random_model("llama", **SHAPE), folder / "model")
    _write_tokenizer(model)
    arguments = ["--num-kv-blocks", "2048", "--threads", "1", "--log-level", "warning"]
    with (
        serving(model, folder, "both", *arguments) as alone,
        deployment(model, folder, arguments) as apart,
    ):
        yield {"alone": alone, "apart": apart}


def _write_tokenizer(model: Path) -> None:
    tiny = Path(__file__).resolve().parents[3] / "examples/tiny-llama"
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (model / name).write_bytes((tiny / name).read_bytes())


def _token_times(client: httpx.Client, url: str, prompt: list[int]) -> tuple[float, float]:
    """Seconds until the first and until the second token's event."""
    body = {
        "prompt": prompt,
        "max_tokens": 3,
        "temperature": 0,
        "stream": True,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    times: list[float] = []
    started = time.perf_counter()
    with client.stream("POST", f"{url}/v1/completions", json=body) as answer:
        answer.read() if answer.status_code != 200 else None
        answer.raise_for_status()
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            for choice in json.loads(line[6:])["choices"]:
                if choice.get("token_ids"):
                    times.append(time.perf_counter() - started)
    return times[0], times[1]


def test_kv_transfer_adds_little_to_first_token(benchmark, urls: dict[str, str]) -> None:
    generator = np.random.default_rng(0)
    seen: dict[str, list[tuple[float, float]]] = {"alone": [], "apart": []}
    with httpx.Client(timeout=60) as client:

        def one_of_each() -> None:
            for name, url in urls.items():
                prompt = generator.integers(0, 32000, PROMPT_TOKENS).tolist()
                seen[name].append(_token_times(client, url, prompt))

        one_of_each()
        benchmark.pedantic(one_of_each, rounds=ROUNDS)
    copy_ms = _copy_ms()
    alone, apart = (
        [median(column) * 1e3 for column in zip(*seen[name][1:], strict=True)]
        for name in ("alone", "apart")
    )
    for which, index in (("first", 0), ("second", 1)):
        added = apart[index] - alone[index]
        record(
            benchmark,
            Figure(
                f"PD adds to the {which} token",
                added,
                10 + copy_ms,
                "ms",
                at_least=False,
                context=f"alone {alone[index]:.1f} ms, apart {apart[index]:.1f} ms, "
                f"copying {KV_BYTES >> 20} MiB of KV {copy_ms:.1f} ms, {PROMPT_TOKENS} tokens",
            ),
        )


def _copy_ms() -> float:
    source = np.ones(KV_BYTES, dtype=np.uint8)
    target = np.empty_like(source)
    times = []
    for _ in range(9):
        started = time.perf_counter()
        np.copyto(target, source)
        times.append(time.perf_counter() - started)
    return median(times) * 1e3
