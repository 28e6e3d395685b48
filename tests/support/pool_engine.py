"""Multi-turn requests to an engine with the KVCache pool, and to the same engine without it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from support.core_runs import random_prompt, serve_all

from mooncake_engine.assembly import build_engine
from mooncake_engine.config import EngineConfig
from mooncake_engine.core import EngineCore
from mooncake_engine.messages import EngineRequest
from mooncake_engine.sampling_params import SamplingParams
from mooncake_kv.config import KVTransferConfig
from mooncake_kv.pool.pool_config import read_kv_pool

CHUNK = 32
SETTINGS = f"chunk={CHUNK},load=always"
"""Load every hit, even though computing takes less time on so small a model."""
POOL = f"dram=32M,{SETTINGS}"
GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
SETTLE_S = 30.0
Tokens = tuple[int, ...]


@contextmanager
def engine(
    model: Path,
    pool: str | None = POOL,
    network: KVTransferConfig | None = None,
    **options: Any,
) -> Iterator[EngineCore]:
    """An engine in this process; ``options`` are fields of ``EngineConfig``."""
    options = {"dtype": "float32", "threads": 1, "num_kv_blocks": 64, **options}
    kv_pool = (
        None if pool is None else read_kv_pool(pool).with_network(network or KVTransferConfig())
    )
    config = EngineConfig(model, kv_pool=kv_pool, **options)
    core = build_engine(config).core
    try:
        yield core
    finally:
        core.close()


def ask(core: EngineCore, prompts: Sequence[Tokens], sampling: SamplingParams = GREEDY, n: int = 1):
    """Serve prompts at once, each ``n`` times; their answers, and the prompt tokens found."""
    requests = [
        EngineRequest(f"p{i}-{j}", prompt, sampling, group=f"p{i}" if n > 1 else None)
        for i, prompt in enumerate(prompts)
        for j in range(n)
    ]
    outcome = serve_all(core, requests)
    settle(core)
    cached = [max(u.num_cached_tokens for u in outcome.updates[r.request_id]) for r in requests]
    return [outcome.answers[r.request_id] for r in requests], cached


def settle(core: EngineCore) -> None:
    """Step until all saves have completed."""
    deadline = time.monotonic() + SETTLE_S
    while (pool := core.report().stats.kv_pool) is not None and pool.saves_in_flight:
        core.step()
        assert time.monotonic() < deadline, f"saves did not complete in time: {pool}"


def forget(core: EngineCore) -> None:
    """Clear the device's prefix cache, but not the pool."""
    assert core.reset_prefix_cache()


def two_turns(core: EngineCore, length: int = 200, seed: int = 1, **options: Any):
    """A prompt, then the conversation's next turn, whose prefix only the pool has; returns all
    tokens, and how many of the second prompt's tokens were found."""
    first = random_prompt(seed, length)
    (answer, *others), _ = ask(core, [first], **options)
    forget(core)
    second = (*first, *answer, *random_prompt(seed + 1, 30))
    answers, cached = ask(core, [second], **options)
    return [answer, *others, *answers], cached[0]
