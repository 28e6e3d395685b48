#!/usr/bin/env python3
"""Serves real models with separate prefill and decode, and compares the tokens with transformers.

Tests SmolLM2-135M-Instruct (Llama, 9 query and 3 key/value heads, a Q4_1 GGUF file) and stories15M
(Llama, 6 heads, float32) with both connectors, and one or three ranks on either side. transformers
reads the same files. Exits 0 only if every token is equal, 77 if weights can't be downloaded.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))
os.environ["OMP_NUM_THREADS"] = "1"

import stories15m  # noqa: E402  # the path is set above
import torch  # noqa: E402
from support.metaserver import metaserver  # noqa: E402
from support.pd import GREEDY, Answer, Pair, ask_pair, pair  # noqa: E402
from support.push import LAYERWISE, PULLING, PushPair, ask_pushed  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM  # noqa: E402
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint  # noqa: E402

from mooncake_engine.checkpoints.model_source import find_model  # noqa: E402
from mooncake_engine.text.tokenizer import Tokenizer  # noqa: E402

ASKED = (
    "What is the capital of France?",
    "Write a Python function that adds two numbers.",
    "Why is the sky blue? Answer in one sentence.",
    "Translate to German: the weather is nice in 2024, isn't it?\n\n  * yes\n  * no",
)
BEGUN = (
    "Once upon a time",
    "Lily and Tom went to the park. They saw a big red ball",
    'One day, a little dog found a bone. "Mum," he said, "look',
    "There was a boy who did not like rain.\n\nHe",
)
NUM_TOKENS = 24
STORIES = ROOT / ".cache" / "models" / "stories15m"
SIZES = ((1, 1), (3, 1), (1, 3))
CONNECTORS = {"pull": PULLING, "push": LAYERWISE}
Prompt = tuple[int, ...]


@dataclass(frozen=True)
class RealModel:
    """A model to serve, its prompts, and transformers' tokens for them."""

    directory: Path
    prompts: Sequence[Prompt]
    expected: Sequence[Sequence[int]]


def main() -> int:
    """Compare model by model; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--connector", choices=CONNECTORS, help="only this one")
    parser.add_argument("--model", choices=MODELS, help="only this one")
    args = parser.parse_args()
    failures, is_missing = 0, False
    for name, load in MODELS.items():
        if args.model not in (None, name):
            continue
        model = load()
        if model is None:
            is_missing = True
            continue
        print(repr(Tokenizer.load(model.directory).decode(model.expected[0])), flush=True)
        for connector in [args.connector] if args.connector else CONNECTORS:
            failures += sum(differences(name, model, connector, sizes) for sizes in SIZES)
    return 1 if failures else 77 if is_missing else 0


def differences(name: str, model: RealModel, connector: str, sizes: tuple[int, int]) -> int:
    """Number of prompts with answers that differ."""
    started = time.monotonic()
    of = pair_tokens(model.directory, CONNECTORS[connector], sizes, model.prompts)
    wrong = sum(a != b for a, b in zip(asyncio.run(of), model.expected, strict=True))
    seconds = time.monotonic() - started
    shape = f"{connector} TP {sizes[0]} to {sizes[1]}"
    print(f"{name} {shape}: {wrong} wrong, {seconds:.1f} s", flush=True)
    return wrong


# ---------------------------------------------------------------- models


def smollm2() -> RealModel | None:
    """SmolLM2 with chat prompts; None if it can't be downloaded."""
    command = [sys.executable, str(ROOT / "ci" / "example_model.py"), "smollm2"]
    fetched = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if fetched.returncode:
        return None
    path = Path(fetched.stdout.strip())
    directory = find_model(path).directory
    tokenizer = Tokenizer.load(directory)
    texts = [tokenizer.render_chat([{"role": "user", "content": text}]) for text in ASKED]
    prompts = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    return RealModel(directory, prompts, transformers_tokens(gguf_model(path), prompts))


def stories15m_model() -> RealModel | None:
    """stories15M with beginnings of stories as prompts; None if it can't be downloaded."""
    if not stories15m.fetch(STORIES):
        return None
    tokenizer = Tokenizer.load(STORIES)
    prompts = [tokenizer.encode(text) for text in BEGUN]
    model = AutoModelForCausalLM.from_pretrained(STORIES, dtype=torch.float32)
    return RealModel(STORIES, prompts, transformers_tokens(model.eval(), prompts))


MODELS = {"smollm2": smollm2, "stories15m": stories15m_model}


def gguf_model(path: Path) -> Any:
    """Load a GGUF file with transformers, in float32."""
    # from_pretrained would require the package accelerate for a GGUF file
    config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    read = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)
    missing, unexpected = model.load_state_dict(read["tensors"], strict=False)
    assert not unexpected, unexpected
    assert missing == ["lm_head.weight"], missing  # tied to the embedding
    model.tie_weights()
    return model


def transformers_tokens(model: Any, prompts: Sequence[Prompt]) -> list[list[int]]:
    """Tokens that transformers generates."""
    found = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        generated = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),  # or <|im_end|>, also the padding token, is masked
            max_new_tokens=NUM_TOKENS,
            min_new_tokens=NUM_TOKENS,
            do_sample=False,
            eos_token_id=None,
        )
        found.append(generated[0, len(prompt) :].tolist())
    return found


# ---------------------------------------------------------------- pairs


async def pair_tokens(
    directory: Path, connector: str, sizes: tuple[int, int], prompts: Sequence[Prompt]
) -> list[list[int]]:
    """Tokens that a pair generates, with all prompts at once."""
    sampling = replace(GREEDY, max_tokens=NUM_TOKENS)
    prefill, decode = ({"tp_size": size} for size in sizes)
    options = {"connector": connector, "dtype": "float32", "lease_s": 60.0}
    async with pair(directory, prefill=prefill, decode=decode, **options) as both:
        if connector == LAYERWISE:
            pushed = PushPair(both)
            async with metaserver(pushed.dispatch) as pushed.metaserver:
                return await answers(lambda p: ask_pushed(pushed, p, sampling), both, prompts)
        return await answers(lambda p: ask_pair(both, p, sampling), both, prompts)


async def answers(
    ask: Callable[[Prompt], Awaitable[Answer]], both: Pair, prompts: Sequence[Prompt]
) -> list[list[int]]:
    """Tokens of all prompts; checks that KV was transferred and all blocks were freed."""
    found = await asyncio.gather(*(ask(prompt) for prompt in prompts))
    assert both.decode.stat("bytes_received") > 0, "no KV was transferred"
    await both.check_clean(30.0)
    return [answer.tokens for answer in found]


if __name__ == "__main__":
    sys.exit(main())
