"""Instances in processes of their own, which can be killed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
from support.pd import GREEDY, ORDER
from support.programs import Program, running

from mooncake_engine.sampling_params import SamplingParams
from mooncake_kv.params import KVTransferDict


@dataclass(frozen=True)
class Served:
    """An instance behind HTTP.

    Args:
        url: of its API.
        program: its process.
    """

    url: str
    program: Program

    def kill(self) -> None:
        """Kill it with SIGKILL and wait for its exit."""
        self.program.process.kill()
        self.program.process.wait()

    async def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        """Send one completion request.

        Raises:
            httpx.HTTPError: the instance is gone, or rejected the request.
        """
        async with httpx.AsyncClient(timeout=60.0) as client:
            answer = await client.post(f"{self.url}/v1/completions", json=body)
            answer.raise_for_status()
            found: dict[str, Any] = answer.json()
            return found

    async def prefill(self, prompt: Sequence[int], salt: str | None = None) -> KVTransferDict:
        """Prefill a prompt for another instance; returns the params."""
        body = body_of(prompt, replace(GREEDY, max_tokens=1), ORDER, salt)
        params: KVTransferDict = (await self.complete(body))["kv_transfer_params"]
        return params

    async def figure(self, name: str) -> float:
        """The value of one of its metrics."""
        async with httpx.AsyncClient(timeout=10.0) as client:
            text = (await client.get(f"{self.url}/metrics")).text
        lines = [line for line in text.splitlines() if line.startswith(name)]
        return float(lines[0].rsplit(" ", 1)[1])

    async def wait_until_idle(self, within_s: float) -> None:
        """Wait until it runs nothing and all of its blocks are free.

        Raises:
            AssertionError: it is still busy after that time.
        """
        for _ in range(int(within_s / 0.05)):
            if not await self.figure("vllm:kv_cache_usage_perc"):
                return
            await asyncio.sleep(0.05)
        raise AssertionError(f"{self.url} still has blocks in use after {within_s:g} s")


def body_of(
    prompt: Sequence[int],
    sampling: SamplingParams,
    params: KVTransferDict | None = None,
    salt: str | None = None,
) -> dict[str, Any]:
    """The body of a completion request; a salt of its own finds no KV of earlier requests."""
    salted = {} if salt is None else {"cache_salt": salt}
    return {
        **salted,
        "prompt": list(prompt),
        "temperature": sampling.temperature,
        "max_tokens": sampling.max_tokens,
        "top_p": sampling.top_p,
        "seed": sampling.seed,
        "ignore_eos": sampling.ignore_eos,
        "return_token_ids": True,
        "kv_transfer_params": params,
    }


@contextmanager
def serving(
    model: Path, role: str, *options: str, environment: Mapping[str, str] | None = None
) -> Iterator[Served]:
    """An instance in a process of its own on a free port."""
    argv = ["serve", "--model", str(model), "--role", role, "--port", "0", "--threads", "1"]
    argv += ["--num-kv-blocks", "128", *options]
    with running("mooncake_engine.cli", *argv, environment=environment) as program:
        yield Served(program.wait_for("ready ").split()[1], program)
