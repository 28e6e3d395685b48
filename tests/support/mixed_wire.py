"""All that crosses between a P and a D, counted in a network where nothing else is."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import torch
from support.mixed_fleet import Side, ask_across, check_idle, start_all
from support.pd import prompt_of, write_model

from mooncake_engine.models.catalog import kv_geometry, read_model_config

LIMIT = 1.02
"""Bytes on the wire, of all kinds, by those of the KV."""
NUM_TOKENS = 490
_SHAPE = {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 128, "hidden_size": 96}
_MARK = "MIXED_WIRE_INSIDE"


def enter_own_network() -> None:
    """Start this program again in a network namespace that has loopback alone."""
    if os.environ.get(_MARK):
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
        return
    argv = ["unshare", "--map-root-user", "--net", sys.executable, *sys.argv]
    os.execvpe(argv[0], argv, os.environ | {_MARK: "1"})


def write_wide_model(folder: Path) -> Path:
    """Of 16 KiB of KV per token: 8 MB per prompt, beside which requests are small."""
    return write_model(folder / "wide", "llama", dtype="bfloat16", num_hidden_layers=4, **_SHAPE)


async def bytes_by_kv(model: Path, how: str, sides: tuple[Side, Side]) -> float:
    """What one prompt puts on the wire, HTTP and side channel included, by the bytes of its KV.

    Raises:
        AssertionError: it is more than LIMIT.
    """
    both = (("prefill", sides[0]), ("decode", sides[1]))
    with ExitStack() as stack:
        prefill, decode = start_all(stack, model, how, both)
        await ask_across(prefill, decode, how, prompt_of(40))  # hands are shaken
        before = _loopback_bytes()
        await ask_across(prefill, decode, how, prompt_of(NUM_TOKENS))
        crossed = _loopback_bytes() - before
        await check_idle(prefill)
        await check_idle(decode)
    geometry = kv_geometry(read_model_config(model), torch.bfloat16)
    ratio = crossed / (geometry.token_bytes * NUM_TOKENS)
    assert ratio <= LIMIT, f"{crossed} bytes crossed, {ratio:.3f} of the KV"
    return ratio


def _loopback_bytes() -> int:
    [line] = [row for row in Path("/proc/net/dev").read_text().splitlines() if "lo:" in row]
    return int(line.partition(":")[2].split()[0])
