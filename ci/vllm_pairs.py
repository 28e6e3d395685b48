"""Notation for pairs of vLLM instances with our connector, and functions that serve them.

A pair is written as P's and D's tensor-parallel sizes (1x2: with two pipeline stages; 1d2: with two
data-parallel ranks), the transport, the flow (pull or push), vLLM's kv_load_failure_policy
(recompute), and the model: full; sliding, whose layers have blocks of three KV-cache groups; or
latent, DeepSeek's attention.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from vllm_environment import CACHE
from vllm_requests import post
from vllm_serving import (
    OF_EXAMPLE,
    Json,
    RunningVllm,
    cores,
    prepare_model,
    serving,
    transfer_config,
)

TIMEOUT_S = 120.0
"""Timeout of a transfer in seconds: on a busy machine a worker was once not scheduled for 30 s."""
FULL, SLIDING, LATENT = "full", "sliding", "latent"


@dataclass(frozen=True)
class Model:
    """A model that pairs serve.

    Args:
        num_groups: number of its KV-cache groups.
        words: options of ``vllm serve`` for it.
        has_prefix_cache: whether vLLM's CPU build supports prefix caching with it.
    """

    num_groups: int = 1
    words: tuple[str, ...] = ()
    has_prefix_cache: bool = True


MODELS = {
    FULL: Model(),
    SLIDING: Model(num_groups=3, words=OF_EXAMPLE),
    # vLLM's own CPU op rotates non-contiguous queries, such as these, incorrectly.
    LATENT: Model(
        words=(*OF_EXAMPLE, "--compilation-config", '{"custom_ops": ["none"]}'),
        has_prefix_cache=False,
    ),
}
SECRET = CACHE / "vllm-secret"
ALL_PAIRS = ",".join(
    [
        f"{prefill}:{decode}/{transport}/{flow}"
        for flow in ("pull", "push")
        for prefill in (1, 2)
        for decode in (1, 2)
        for transport in ("shm", "tcp")
    ]
    + ["1x2:1/shm", "1x2:1/shm/push", "1:1x2/shm", "1d2:1/tcp", "1:1d2/tcp", "1d2:1/shm/push"]
    + ["1:1/shm/pull/fail"]
    + [
        f"{pair}/recompute/{model}"
        for model in (SLIDING, LATENT)
        for pair in ("1:1/shm/pull", "2:1/tcp/pull", "1:2/shm/push")
    ]
)


@dataclass(frozen=True)
class Size:
    """Size of an instance: tensor-parallel ranks, pipeline stages, data-parallel ranks."""

    tp: int = 1
    pp: int = 1
    dp: int = 1

    @classmethod
    def parse(cls, text: str) -> Size:
        """Read ``2``, or with stages ``1x2``, or with data-parallel ranks ``1d2``."""
        tp, pp, dp = re.fullmatch(r"(\d+)(?:x(\d+))?(?:d(\d+))?", text).groups("1")  # type: ignore[union-attr]  # ends with a trace
        return cls(int(tp), int(pp), int(dp))

    def __str__(self) -> str:
        stages = f"x{self.pp}" if self.pp > 1 else ""
        return f"{self.tp}{stages}" + (f"d{self.dp}" if self.dp > 1 else "")

    @property
    def words(self) -> tuple[str, ...]:
        """Options of ``vllm serve``."""
        found = ["--tensor-parallel-size", str(self.tp), "--data-parallel-size", str(self.dp)]
        if self.pp > 1:
            # Without a warm-up, vLLM's later stages have no receive buffer, and crash.
            found += ["--pipeline-parallel-size", str(self.pp), "--no-enforce-eager"]
        return tuple(found)


@dataclass(frozen=True)
class Pair:
    """A prefill and a decode instance.

    Args:
        prefill, decode: sizes of the instances.
        transport: transport of the KV.
        flow: ``"pull"`` or ``"push"``.
        policy: how D handles a failed load: ``"recompute"`` or ``"fail"``.
        model: name from ``MODELS``.
    """

    prefill: Size
    decode: Size
    transport: str
    flow: str = "pull"
    policy: str = "recompute"
    model: str = FULL

    @classmethod
    def parse(cls, text: str) -> Pair:
        """Read ``2:1/tcp``, ``1x2:1/shm``, ``1:1/shm/push``, ``1:1/shm/pull/fail`` or
        ``1:1/shm/pull/recompute/sliding``."""
        sizes, *others = text.split("/")
        prefill, _, decode = sizes.partition(":")
        return cls(Size.parse(prefill), Size.parse(decode), *others)

    def __str__(self) -> str:
        policy = "" if self.policy == "recompute" else f"/{self.policy}"
        model = "" if self.model == FULL else f"/{self.model}"
        return f"{self.prefill}:{self.decode}/{self.transport}/{self.flow}{policy}{model}"


def folder_of(python: Path, model: str) -> Path | None:
    """Folder of a pair's model; None for the example."""
    return None if model == FULL else prepare_model(python, model)


def answers_alone(
    python: Path, timeout_s: float, asked: dict[str, tuple[str, Json]], model: str = FULL
) -> dict[str, Json]:
    """A single vLLM's answers to all requests of the pairs."""
    log, words, folder = CACHE / "vllm-alone.log", MODELS[model].words, folder_of(python, model)
    with serving(python, None, "0", log, *words, model=folder) as vllm:
        vllm.wait_until_healthy(timeout_s)
        answers = {name: post(vllm.url, path, body) for name, (path, body) in asked.items()}
    for name, answer in answers.items():
        if "choices" not in answer:
            raise SystemExit(f"one vLLM alone does not answer {name}: {answer}")
    return answers


def by_prefill(pairs: Iterable[Pair]) -> list[list[Pair]]:
    """Groups of pairs that can share a P."""
    groups: dict[tuple[Size, str], list[Pair]] = {}
    for pair in pairs:
        groups.setdefault((pair.prefill, pair.flow), []).append(pair)
    return list(groups.values())


@contextmanager
def instance(python: Path, role: str, pair: Pair, transports: list[str]) -> Iterator[RunningVllm]:
    """Start a vLLM with our connector, in a deployment with a secret; it may not be ready yet."""
    SECRET.touch(mode=0o600)
    SECRET.write_text("of these pairs of instances\n")
    settings = {"transfer_timeout_seconds": TIMEOUT_S, "secret_file": str(SECRET)}
    transfer = transfer_config(role, pair.flow, transports, **settings)
    size = pair.prefill if role == "kv_producer" else pair.decode
    words = (*MODELS[pair.model].words, *size.words, "--max-num-batched-tokens", "256")
    with serving(
        python,
        transfer | {"kv_load_failure_policy": pair.policy},
        cores(0 if role == "kv_producer" else 1, size.tp * size.pp * size.dp),
        CACHE / f"vllm-{role}.log",
        *words,
        model=folder_of(python, pair.model),
    ) as vllm:
        yield vllm
