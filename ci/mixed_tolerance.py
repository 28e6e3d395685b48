#!/usr/bin/env python3
"""Measures how far results of a mixed pair (P and D on different backends) differ from D alone.

Answers every prompt greedily with D alone and with each P in front of it, on emulated devices whose
kernels compute like the real ones (CUDA's are interpreted), and on the CPU with its own kernels and
with torch's. Prints a table per data type: the number of equal tokens, the differences of their
log-probabilities, and the differences of the most likely tokens' logits. It checks no bounds;
docs/mixed.md has the figures and their meaning.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))
os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}

from support.emulated_devices import KINDS, DeviceKind  # noqa: E402  # the path is set above
from support.mixed_fleet import Side, start_all  # noqa: E402
from support.npu import FEW  # noqa: E402
from support.pd import ORDER, prompt_of  # noqa: E402
from support.pd_processes import Served, body_of  # noqa: E402
from support.programs import TINY_LLAMA  # noqa: E402

from mooncake_kv.params import KVTransferDict  # noqa: E402

_GPU = KINDS["cuda"]
TOP = 20
"""Number of most likely tokens per position whose logits are compared."""
VARIANTS: dict[str, DeviceKind] = {
    "cpu": KINDS["cpu"],
    "cpu, torch": replace(KINDS["cpu"], variables={"MOONCAKE_HAL_CPU_NATIVE": "0"}),
    "gpu": replace(_GPU, variables={**_GPU.variables, "EMULATED_CUDA_KERNELS": "interpreted"}),
    "npu": KINDS["npu"],
}
TYPES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "float32": (("cpu", "cpu, torch", "gpu"), ("--dtype", "float32")),
    "bfloat16": (("cpu", "cpu, torch", "gpu", "npu"), ("--dtype", "bfloat16")),
    "bfloat16, KV in fp8": (
        ("cpu", "cpu, torch", "gpu"),
        ("--dtype", "bfloat16", "--kv-cache-dtype", "fp8"),
    ),
}
"""For each data type, the variants that support it and the engine's options."""


@dataclass(frozen=True)
class Answer:
    """Tokens, their log-probabilities, and those of each position's most likely tokens."""

    tokens: list[int]
    logprobs: list[float]
    tops: list[dict[str, float]]


@dataclass(frozen=True)
class Distance:
    """Differences between two lists of answers to the same prompts.

    Args:
        same, total: equal tokens and all tokens, up to the first difference in each answer.
        mean, most: mean and maximum difference of their log-probabilities, in nats.
        logits: maximum difference between two logits of a token, without the constant offset per
            position, which has no effect.
    """

    same: int
    total: int
    mean: float
    most: float
    logits: float

    def __str__(self) -> str:
        tokens = f"{self.same:>4} of {self.total:<5}"
        return tokens + "".join(f"{each:>10.2g}" for each in (self.mean, self.most, self.logits))


def main() -> int:
    """Run the requested data types."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--type", nargs="+", choices=tuple(TYPES), default=tuple(TYPES))
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--length", type=int, default=24, help="tokens per prompt")
    parser.add_argument("--tokens", type=int, default=8, help="tokens per answer")
    args = parser.parse_args()
    for name in args.type:
        asyncio.run(study(name, args))
    return 0


async def study(name: str, args: argparse.Namespace) -> None:
    """Measure and print the table of one data type."""
    variants, options = TYPES[name]
    prompts = [prompt_of(args.length, seed) for seed in range(args.prompts)]
    sides = [Side(each, VARIANTS[each].block_sizes[-1]) for each in variants]
    wanted = [("prefill", side) for side in sides] + [("decode", side) for side in sides]
    with ExitStack() as stack:
        found = start_all(stack, TINY_LLAMA, "pull", wanted, VARIANTS, options)
        prefills = dict(zip(variants, found, strict=False))
        decodes = dict(zip(variants, found[len(variants) :], strict=True))
        print(f"\n{name:<34}{'same tokens':>12}{'mean':>9}{'most':>10}{'logits':>10}", flush=True)
        alone = {
            each: [await ask(decodes[each], prompt, args.tokens) for prompt in prompts]
            for each in variants
        }
        for each, other in zip(variants[1:], [variants[0]] * len(variants), strict=False):
            row = f"{each} alone, {other} alone"
            print(f"{row:<34}{distance(alone[each], alone[other])}", flush=True)
        for p, d in ((p, d) for p in variants for d in variants if p != d):
            both = [await across(prefills[p], decodes[d], each, args.tokens) for each in prompts]
            row = f"{p} → {d}, {d} alone"
            print(f"{row:<34}{distance(both, alone[d])}", flush=True)


async def ask(
    where: Served, prompt: Sequence[int], tokens: int, params: KVTransferDict | None = None
) -> Answer:
    """One answer of an instance. Without ``params`` it computes the prompt, without cached KV."""
    body: dict[str, Any] = body_of(prompt, replace(FEW, max_tokens=tokens), params)
    salted = body if params else {**body, "cache_salt": f"alone {prompt[:8]}"}
    [choice] = (await where.complete({**salted, "logprobs": TOP}))["choices"]
    logprobs = choice["logprobs"]
    return Answer(choice["token_ids"], logprobs["token_logprobs"], logprobs["top_logprobs"])


async def across(prefill: Served, decode: Served, prompt: Sequence[int], tokens: int) -> Answer:
    """One answer of a pair; P returns the first token and its log-probability."""
    body = {**body_of(prompt, replace(FEW, max_tokens=1), ORDER), "logprobs": TOP}
    params: KVTransferDict = (await prefill.complete(body))["kv_transfer_params"]
    return await ask(decode, prompt, tokens, params)


def distance(ours: Sequence[Answer], theirs: Sequence[Answer]) -> Distance:
    """The differences between two lists of answers."""
    apart: list[float] = []
    logits = [0.0]
    for mine, other in zip(ours, theirs, strict=True):
        pairs = list(zip(mine.tokens, other.tokens, strict=False))
        same = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
        both = zip(mine.logprobs[:same], other.logprobs[:same], strict=True)
        apart += [abs(a - b) for a, b in both]
        logits += map(logit_distance, mine.tops[:same], other.tops[:same])
    total = sum(len(each.tokens) for each in theirs)
    mean = sum(apart) / max(len(apart), 1)
    return Distance(len(apart), total, mean, max(apart, default=0.0), max(logits))


def logit_distance(ours: dict[str, float], theirs: dict[str, float]) -> float:
    """The largest difference, over the tokens that both report."""
    apart = [ours[token] - theirs[token] for token in ours.keys() & theirs.keys()]
    middle = sum(apart) / len(apart)
    return max(abs(each - middle) for each in apart)


if __name__ == "__main__":
    sys.exit(main())
