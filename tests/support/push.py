"""Pushed requests: D first, then P, which a metaserver in the test's process sends the prefill."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from support.metaserver import Metaserver, metaserver
from support.pd import GREEDY, Answer, Instance, Pair, ask, ask_pair, instance, pair

from mooncake_engine.messages import TokenUpdate
from mooncake_engine.sampling_params import SamplingParams
from mooncake_kv.params import KVTransferDict

LAYERWISE = "MooncakeLayerwiseConnector"
PULLING = "MooncakeConnector"

_keys = itertools.count()


@dataclass(frozen=True)
class Sent:
    """A prefill that the metaserver has to send to P."""

    prompt: tuple[int, ...]
    sampling: SamplingParams


@dataclass
class PushPair:
    """Two instances and the metaserver between them.

    Args:
        instances: P and D.
        metaserver: where D posts.
        waiting: prefills to send to P, by key.
        prefills: P's answers, by key.
    """

    instances: Pair
    metaserver: Metaserver = field(init=False)
    waiting: dict[str, Sent] = field(default_factory=dict)
    prefills: dict[str, Answer] = field(default_factory=dict)

    @property
    def prefill(self) -> Instance:
        """P."""
        return self.instances.prefill

    @property
    def decode(self) -> Instance:
        """D."""
        return self.instances.decode

    async def dispatch(self, key: str, params: KVTransferDict) -> None:
        """Send the prefill that D asked for."""
        sent = self.waiting.pop(key)
        sampling = replace(sent.sampling, max_tokens=1)
        self.prefills[key] = await ask(self.prefill, sent.prompt, sampling, params)

    async def check_clean(self, within_s: float = 15.0) -> None:
        """Check that both sides have released everything."""
        await self.instances.check_clean(within_s)


@asynccontextmanager
async def push_pair(model: Path, **options: Any) -> AsyncIterator[PushPair]:
    """A pair for the duration of a block; takes the options of ``pair`` and of the metaserver."""
    names = ("status", "is_silent")
    meta = {name: options.pop(name) for name in names if name in options}
    async with pair(model, **{"connector": LAYERWISE, **options}) as instances:
        of = PushPair(instances)
        async with metaserver(of.dispatch, **meta) as of.metaserver:
            yield of


async def ask_pushed(
    of: PushPair,
    prompt: Sequence[int],
    sampling: SamplingParams = GREEDY,
    on_update: Callable[[TokenUpdate], None] | None = None,
    *,
    group: str | None = None,
) -> Answer:
    """Send a request to D, which asks for the prefill."""
    key = f"key-{next(_keys)}"
    of.waiting[key] = Sent(tuple(prompt), sampling)
    params = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "metaserver": of.metaserver.url(key),
        "do_pull": of.instances.decode.engine.config.kv_transfer.connector == PULLING,
    }
    return await ask(of.decode, prompt, sampling, params, on_update, group=group)


def early_pull_pair(model: Path, **options: Any) -> AbstractAsyncContextManager[PushPair]:
    """A pair whose D reads each chunk of a prompt while P computes the next one."""
    return push_pair(model, connector=PULLING, **options)


WAYS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "pulled": (pair, ask_pair),
    "pulled early": (early_pull_pair, ask_pushed),
    "pushed": (push_pair, ask_pushed),
}
"""By how KV gets to D: the function that makes such a pair, and the one that asks it."""


def run_beside_one(
    make_both: Callable[..., Any],
    model: Path,
    scenario: Callable[[Instance, Any], Coroutine[Any, Any, None]],
    **options: Any,
) -> None:
    """Run a scenario on a single instance and a pair; check afterwards that every block is free.

    Args:
        make_both: ``pair`` or ``push_pair``.
        model: of all three instances.
        scenario: sends the requests.
        options: of the pair.
    """

    async def main() -> None:
        async with instance(model) as single, make_both(model, **options) as both:
            await scenario(single, both)
            await both.check_clean()

    asyncio.run(main())
