"""Prefill and decode instances in the test's own process, and requests that use both."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mooncake_engine.assembly import build_engine
from mooncake_engine.async_engine import AsyncEngine
from mooncake_engine.config import EngineConfig, Role
from mooncake_engine.core import EngineCore
from mooncake_engine.kv_connector import read_kv_transfer_params
from mooncake_engine.messages import EngineRequest, FinishReason, TokenLogprobs, TokenUpdate
from mooncake_engine.sampling_params import SamplingParams
from mooncake_kv.config import KVTransferConfig
from mooncake_kv.params import KVTransferDict
from mooncake_kv.pool.pool_config import read_kv_pool

VOCAB_SIZE = 258
DEFAULT_BLOCKS = 128
ORDER: KVTransferDict = {"do_remote_decode": True, "do_remote_prefill": False}
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)

_names = itertools.count()


def write_model(directory: Path, family: str = "llama", **overrides: Any) -> Path:
    """A random two-layer model with a byte tokenizer; 512 tokens of context."""
    # transformers, which only this needs, takes half a minute to import on an emulated machine
    from support.byte_tokenizer import write_byte_tokenizer
    from support.checkpoints import random_model, write_checkpoint

    fields = {"num_hidden_layers": 2, "vocab_size": VOCAB_SIZE, **overrides}
    write_checkpoint(random_model(family, **fields), directory)
    return write_byte_tokenizer(directory)


def prompt_of(length: int, seed: int = 0) -> tuple[int, ...]:
    """Random token ids, the same for the same arguments; none of them is an end token."""
    numbers = random.Random(f"{length}/{seed}")
    return tuple(numbers.randrange(3, VOCAB_SIZE) for _ in range(length))


@dataclass(frozen=True)
class Instance:
    """A running instance.

    Args:
        engine: serves its requests.
        core: the engine's core, for inspection while it is idle.
    """

    engine: AsyncEngine
    core: EngineCore

    def stat(self, name: str) -> float:
        """One of the connector's figures."""
        return self.engine.stats().kv_transfer[name]

    @property
    def is_idle(self) -> bool:
        """Whether no request is running, waiting, or holding blocks for a peer."""
        stats = self.engine.stats()
        held = sum(stats.kv_transfer.get(name, 0.0) for name in ("leases_held", "reservations"))
        return not (stats.num_running or stats.num_waiting or stats.kv_cache_usage or held)

    async def check_clean(self, within_s: float = 10.0) -> None:
        """Check that all is released within that time and the block accounting is consistent."""
        await wait_until(lambda: self.is_idle, within_s, lambda: f"still busy: {self.describe()}")
        self.core.check_integrity()
        self.engine.check_health()

    def describe(self) -> str:
        """Its figures, for error messages."""
        return f"{self.engine.config.role.value}: {self.engine.stats()}"


def make_config(model: Path, role: Role = Role.BOTH, **options: Any) -> EngineConfig:
    """An instance's configuration; takes options of both KVTransferConfig and EngineConfig."""
    names = KVTransferConfig.__dataclass_fields__
    kv_options = {name: options.pop(name) for name in list(options) if name in names}
    kv_options = {"transports": ("shm",), "lease_s": 2.0, "transfer_timeout_s": 10.0, **kv_options}
    options = {"num_kv_blocks": DEFAULT_BLOCKS, "backend": "cpu", "threads": 1, **options}
    network = KVTransferConfig(**kv_options)
    if isinstance(pool := options.get("kv_pool"), str):
        options["kv_pool"] = read_kv_pool(pool).with_network(network)
    kv = None if role is Role.BOTH else network
    return EngineConfig(model, role=role, kv_transfer=kv, **options)


def start(config: EngineConfig) -> Instance:
    """Load an instance and start serving."""
    built = build_engine(config)
    return Instance(AsyncEngine(built.core, built.info, config), built.core)


@asynccontextmanager
async def instance(model: Path, role: Role = Role.BOTH, **options: Any) -> AsyncIterator[Instance]:
    """An instance for the duration of a block."""
    config = make_config(model, role, **options)
    running = await asyncio.to_thread(start, config)
    try:
        yield running
    finally:
        await asyncio.to_thread(running.engine.close)


@dataclass
class Pair:
    """A prefill and a decode instance of one model."""

    prefill: Instance
    decode: Instance

    async def check_clean(self, within_s: float = 10.0) -> None:
        """See ``Instance.check_clean``."""
        await self.prefill.check_clean(within_s)
        await self.decode.check_clean(within_s)


@asynccontextmanager
async def pair(
    model: Path,
    *,
    prefill: dict[str, Any] | None = None,
    decode: dict[str, Any] | None = None,
    **options: Any,
) -> AsyncIterator[Pair]:
    """Two instances for the duration of a block; ``prefill`` and ``decode`` override options."""
    async with (
        instance(model, Role.PREFILL, **{**options, **(prefill or {})}) as first,
        instance(model, Role.DECODE, **{**options, **(decode or {})}) as second,
    ):
        yield Pair(first, second)


@dataclass
class Answer:
    """The result of a request.

    Args:
        tokens, logprobs: of the answer, the first token included.
        finish, error: how it ended.
        params: for the decode instance, if the request continues there.
        num_cached_tokens: as the engine reported it.
        arrived_at: when each token arrived, in seconds of the monotonic clock.
    """

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish: FinishReason | None = None
    error: str | None = None
    params: KVTransferDict | None = None
    num_cached_tokens: int = 0
    arrived_at: list[float] = field(default_factory=list)

    def add(self, update: TokenUpdate) -> None:
        """Add an update."""
        self.tokens.extend(update.token_ids)
        self.logprobs.extend(update.logprobs or ())
        self.arrived_at.extend([time.monotonic()] * len(update.token_ids))
        self.finish, self.error = update.finish, update.error
        self.params = update.kv_transfer_params
        self.num_cached_tokens = max(self.num_cached_tokens, update.num_cached_tokens)


async def ask(
    where: Instance,
    prompt: Sequence[int],
    sampling: SamplingParams = GREEDY,
    params: KVTransferDict | None = None,
    on_update: Callable[[TokenUpdate], None] | None = None,
    *,
    group: str | None = None,
) -> Answer:
    """Send a request to one instance and wait until it has finished."""
    answer = Answer()
    kv_params = read_kv_transfer_params(params, prompt)
    request = EngineRequest(f"test-{next(_names)}", tuple(prompt), sampling, kv_params, group=group)
    async with aclosing(where.engine.generate(request)) as updates:
        async for update in updates:
            answer.add(update)
            if on_update is not None:
                on_update(update)
    return answer


async def prefill(
    where: Instance, prompt: Sequence[int], sampling: SamplingParams = GREEDY
) -> KVTransferDict:
    """Prefill a prompt as the proxy would; returns the params for the decode instance."""
    first = await ask(where, prompt, replace(sampling, max_tokens=1), ORDER)
    assert first.finish is FinishReason.LENGTH, first
    assert first.params is not None
    return first.params


async def ask_pair(of: Pair, prompt: Sequence[int], sampling: SamplingParams = GREEDY) -> Answer:
    """Prefill on one instance, decode on the other."""
    return await ask(of.decode, prompt, sampling, await prefill(of.prefill, prompt, sampling))


async def wait_until(
    is_true: Callable[[], bool], within_s: float, describe: Callable[[], str] = str
) -> None:
    """Wait for a condition that other threads make true.

    Raises:
        AssertionError: it is not true within that time; ``describe`` gives the current state.
    """
    deadline = time.monotonic() + within_s
    while not is_true():
        assert time.monotonic() < deadline, f"still waiting after {within_s:g} s: {describe()}"
        await asyncio.sleep(0.01)
