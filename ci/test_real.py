#!/usr/bin/env python3
"""A real model through prefill and decode apart: its tokens are transformers' own.

SmolLM2-135M-Instruct (Llama, 9 query and 3 key/value heads, a GGUF file of Q4_1) over both
connectors, one rank and three on either side; the oracle reads the same file with transformers.
Exits 0 only if every token is equal, 77 where the weights can't be fetched.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))
os.environ["OMP_NUM_THREADS"] = "1"

from support.metaserver import metaserver  # noqa: E402  # the path is set above
from support.pd import GREEDY, Answer, Pair, ask_pair, pair  # noqa: E402
from support.push import LAYERWISE, PULLING, PushPair, ask_pushed  # noqa: E402

from mooncake_engine.checkpoints.model_source import find_model  # noqa: E402
from mooncake_engine.text.tokenizer import Tokenizer  # noqa: E402

PROMPTS = (
    "What is the capital of France?",
    "Write a Python function that adds two numbers.",
    "Why is the sky blue? Answer in one sentence.",
    "Translate to German: the weather is nice in 2024, isn't it?\n\n  * yes\n  * no",
)
NUM_TOKENS = 24
Prompt = tuple[int, ...]


def main() -> int:
    """Compare, connector by connector; the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--connector", choices=("pull", "push"), help="only this one")
    args = parser.parse_args()
    command = [sys.executable, str(ROOT / "ci" / "example_model.py"), "smollm2"]
    fetched = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if fetched.returncode:
        return fetched.returncode
    path = Path(fetched.stdout.strip())
    directory = find_model(path).directory
    prompts = chat_prompts(directory)
    expected = transformers_tokens(path, prompts)
    print(Tokenizer.load(directory).decode(expected[0]), flush=True)
    connectors = {"pull": PULLING, "push": LAYERWISE}
    failures = 0
    for name, connector in connectors.items():
        if args.connector not in (None, name):
            continue
        for sizes in ((1, 1), (3, 1), (1, 3)):
            started = time.monotonic()
            found = asyncio.run(pair_tokens(directory, connector, sizes, prompts))
            wrong = sum(a != b for a, b in zip(found, expected, strict=True))
            failures += wrong
            seconds = time.monotonic() - started
            print(f"{name} TP {sizes[0]} to {sizes[1]}: {wrong} wrong, {seconds:.1f} s", flush=True)
    return 1 if failures else 0


def chat_prompts(directory: Path) -> list[Prompt]:
    """The prompts as the model's chat template lays them out."""
    tokenizer = Tokenizer.load(directory)
    texts = [tokenizer.render_chat([{"role": "user", "content": text}]) for text in PROMPTS]
    return [tokenizer.encode(text, add_special_tokens=False) for text in texts]


def transformers_tokens(path: Path, prompts: Sequence[Prompt]) -> list[list[int]]:
    """What transformers says, in float32."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    # from_pretrained would want the package accelerate for a GGUF file
    config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    read = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)
    missing, unexpected = model.load_state_dict(read["tensors"], strict=False)
    assert not unexpected, unexpected
    assert missing == ["lm_head.weight"], missing  # is the embedding
    model.tie_weights()
    found = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        generated = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),  # else <|im_end|>, which pads, too, is left out
            max_new_tokens=NUM_TOKENS,
            min_new_tokens=NUM_TOKENS,
            do_sample=False,
            eos_token_id=None,
        )
        found.append(generated[0, len(prompt) :].tolist())
    return found


async def pair_tokens(
    directory: Path, connector: str, sizes: tuple[int, int], prompts: Sequence[Prompt]
) -> list[list[int]]:
    """What a pair says, all prompts at once."""
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
    """Their tokens; KV came across, and all is given back."""
    found = await asyncio.gather(*(ask(prompt) for prompt in prompts))
    assert both.decode.stat("bytes_received") > 0, "nothing came across"
    await both.check_clean(30.0)
    return [answer.tokens for answer in found]


if __name__ == "__main__":
    sys.exit(main())
