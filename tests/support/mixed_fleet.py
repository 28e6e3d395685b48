"""Instances on devices of different kinds, each in processes of its own, that exchange KV."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
from support.emulated_devices import ALL_KINDS, DeviceKind
from support.metaserver import metaserver
from support.npu import FEW, LATENT, Case, Completer, clear_cases, clear_continuation
from support.pd import Instance, write_model
from support.pd_grid import PULL
from support.pd_processes import Served, body_of
from support.programs import Program
from support.push import LAYERWISE

from mooncake_engine.models.catalog import kv_geometry, read_model_config
from mooncake_engine.sampling_params import SamplingParams
from mooncake_kv.params import KVTransferDict

CONNECTORS = {"pull": PULL, "push": LAYERWISE}
_HEADS = {"num_attention_heads": 12, "num_key_value_heads": 12, "head_dim": 16, "hidden_size": 96}
"""Numbers of heads that every tested number of ranks, 1 to 4, divides."""
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", _HEADS),
    "moe": ("mixtral", _HEADS),
    "mla": ("deepseek_v3", {**_HEADS, **LATENT}),
}
LENGTHS = (17, 300)
LEASE_S = 5.0
START_S = 300.0
"""Timeout for the start of all instances on a busy machine."""
TOKENS_IN_POOL = 4096
DEADLINE_S = 120.0
FIRST = replace(FEW, max_tokens=1)

_keys = itertools.count()


@dataclass(frozen=True)
class Side:
    """One instance.

    Args:
        kind: of ALL_KINDS.
        block_size: tokens per block.
        tp_size: ranks.
    """

    kind: str
    block_size: int
    tp_size: int = 1

    def __str__(self) -> str:
        return f"{self.kind}/{self.block_size}"


def write_mixed_model(folder: Path, family: str, **overrides: Any) -> Path:
    """One of FAMILIES in bfloat16, which all kinds support."""
    name, shape = FAMILIES[family]
    return write_model(folder / family, name, dtype="bfloat16", **{**shape, **overrides})


def start_one(model: Path, how: str, role: str, side: Side, *options: str) -> Program:
    """Start an instance of ALL_KINDS; does not wait until it is ready."""
    kind = ALL_KINDS[side.kind]
    argv = [*serve_argv(model, role, how, side, kind), *options]
    return Program(argv, environment=kind.environment)


def serve_argv(model: Path, role: str, how: str, side: Side, kind: DeviceKind) -> list[str]:
    """The command line of an instance; the instance chooses its transports itself."""
    num_blocks = TOKENS_IN_POOL // side.block_size
    return [
        *("mooncake_engine.cli", "serve", "--model", str(model), "--role", role, "--port", "0"),
        *("--threads", "1", "--num-kv-blocks", str(num_blocks)),
        *("--kv-connector", CONNECTORS[how], "--lease-seconds", str(LEASE_S)),
        *kind.serve_options(side.block_size, side.tp_size),
    ]


def start_all(
    stack: ExitStack,
    model: Path,
    how: str,
    wanted: Sequence[tuple[str, Side]],
    kinds: dict[str, DeviceKind] = ALL_KINDS,
    options: Sequence[str] = (),
) -> list[Served]:
    """Start instances of these roles and sides concurrently; the stack stops them."""
    programs = []
    for role, side in wanted:
        kind = kinds[side.kind]
        argv = [*serve_argv(model, role, how, side, kind), *options]
        program = Program(argv, environment=kind.environment)
        stack.callback(program.close)
        programs.append(program)
    return [Served(each.wait_for("ready ", START_S).split()[1], each) for each in programs]


async def ask_across(
    prefill: Served,
    decode: Served,
    how: str,
    prompt: Sequence[int],
    sampling: SamplingParams = FEW,
    salt: str | None = None,
) -> list[int]:
    """Prefill a prompt on one instance and decode it on the other; returns the tokens."""
    if how == "pull":
        params = await prefill.prefill(prompt, salt)
        return tokens_of(await decode.complete(body_of(prompt, sampling, params, salt)))

    async def dispatch(key: str, pushed: KVTransferDict) -> None:
        with contextlib.suppress(httpx.HTTPError):  # some cases kill the instance
            await prefill.complete(body_of(prompt, FIRST, pushed, salt))

    async with metaserver(dispatch) as server:
        params = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "metaserver": server.url(f"mixed-{next(_keys)}"),
        }
        return tokens_of(await decode.complete(body_of(prompt, sampling, params, salt)))


def tokens_of(answer: dict[str, Any]) -> list[int]:
    """The token ids of a completion."""
    tokens: list[int] = answer["choices"][0]["token_ids"]
    return tokens


def completer(served: Served, salt: str | None = None) -> Completer:
    """Asks one instance; a salt keeps it from finding other requests' KV."""

    async def complete(prompt: Sequence[int]) -> list[int]:
        return tokens_of(await served.complete(body_of(prompt, FEW, salt=salt)))

    return complete


async def make_cases(on_cpu: Instance, alone: Sequence[Served] = ()) -> list[Case]:
    """Prompts and their answers on which the CPU and each of ``alone`` agree; the last prompt
    begins with the one before it."""
    others = [completer(served) for served in alone]
    cases = await clear_cases(on_cpu, LENGTHS, others)
    return [*cases, await clear_continuation(on_cpu, cases[-1].prompt, 40, others)]


async def check_cell(
    model: Path,
    how: str,
    pair: tuple[Served, Served],
    decode_side: Side,
    cases: Sequence[Case],
    *,
    salt: str,
) -> None:
    """Check a pair: the CPU's tokens, KV received whole and once, and everything released.

    Raises:
        AssertionError: a check failed.
    """
    prefill, decode = pair
    before = await decode.figure("mooncake:kv_transfer_bytes_received")
    loads = await decode.figure("mooncake:kv_transfer_loads_total")
    for case in cases:
        asking = ask_across(prefill, decode, how, case.prompt, salt=salt)
        found = await asyncio.wait_for(asking, DEADLINE_S)
        assert found == case.tokens, f"wrong tokens {found}, wanted {case.tokens}"
    assert await decode.figure("mooncake:kv_transfer_load_failures") == 0, "a load failed"
    assert await decode.figure("mooncake:kv_transfer_loads_total") == loads + len(cases)
    received = await decode.figure("mooncake:kv_transfer_bytes_received") - before
    wanted = kv_bytes(model, cases, decode_side)
    assert received <= wanted, f"{received:.0f} bytes received, the KV has {wanted}"
    await check_idle(prefill)
    await check_idle(decode)


def kv_bytes(model: Path, cases: Sequence[Case], decode: Side) -> int:
    """Bytes of KV that have to be transferred: whole prompts, less what D has cached of the last
    one; times the ranks that keep a copy of their own."""
    import torch

    geometry = kv_geometry(read_model_config(model), torch.bfloat16)
    *others, extended = (len(case.prompt) for case in cases)
    cached = others[-1] // decode.block_size * decode.block_size
    copies = decode.tp_size if geometry.kv_heads == 1 else 1
    return geometry.token_bytes * (sum(others) + extended - cached) * copies


async def check_idle(served: Served, within_s: float = 2 * LEASE_S + 5.0) -> None:
    """Wait until no block is in use and no lease or reservation is held.

    Raises:
        AssertionError: something is still held after that time.
    """
    names = ("mooncake:kv_transfer_leases_held", "mooncake:kv_transfer_reservations")
    deadline = time.monotonic() + within_s
    await served.wait_until_idle(within_s)
    while held := {name: count for name in names if (count := await served.figure(name))}:
        assert time.monotonic() < deadline, f"{served.url} still has {held} after {within_s:g} s"
        await asyncio.sleep(0.2)


def freeze(served: Served) -> None:
    """Stop all of its processes, core and ranks included, until they are killed or thawed."""
    os.killpg(served.program.process.pid, signal.SIGSTOP)


def thaw(served: Served) -> None:
    """Continue the frozen processes."""
    os.killpg(served.program.process.pid, signal.SIGCONT)


def left_in_shared_memory() -> set[str]:
    """Names of files in /dev/shm that no running process has mapped."""
    mapped = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):  # the process has ended, or belongs to another user
            lines = maps.read_text().splitlines()
            mapped |= {Path(line.split()[-1]).name for line in lines if "/dev/shm/" in line}
    return {path.name for path in Path("/dev/shm").iterdir()} - mapped
