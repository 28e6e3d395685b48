"""Counts all bytes between a P and a D, on a virtual cable between two network namespaces.

Traffic among the ranks of one side stays inside its namespace and isn't counted.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from support.emulated_devices import ALL_KINDS
from support.mixed_fleet import Side, ask_across, check_idle, serve_argv
from support.pd import prompt_of, write_model
from support.pd_processes import Served
from support.programs import Program

from mooncake_engine.models.catalog import kv_geometry, read_model_config

LIMIT = 1.02
"""Upper limit of all bytes on the wire divided by the bytes of KV."""
NUM_TOKENS = 490
_SHAPE = {"num_attention_heads": 12, "num_key_value_heads": 12, "head_dim": 128, "hidden_size": 96}
_MARK = "MIXED_WIRE_INSIDE"
_HERE, _THERE, _CABLE = "10.77.0.1", "10.77.0.2", "kv0"
_BEGIN_S = 10.0


def enter_own_network() -> None:
    """Restart this program in a network namespace that has only loopback."""
    if os.environ.get(_MARK):
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
        return
    argv = ["unshare", "--map-root-user", "--net", sys.executable, *sys.argv]
    os.execvpe(argv[0], argv, os.environ | {_MARK: "1"})


@contextmanager
def other_network() -> Iterator[tuple[str, ...]]:
    """A second network namespace, connected by a cable; yields the command that enters it."""
    ours = Path("/proc/self/ns/net").readlink()
    holder = subprocess.Popen(["unshare", "--net", "sleep", "86400"])
    try:
        deadline = time.monotonic() + _BEGIN_S
        while Path(f"/proc/{holder.pid}/ns/net").readlink() == ours:
            assert time.monotonic() < deadline, "no second network namespace"
            time.sleep(0.01)
        through = ("nsenter", "--target", str(holder.pid), "--net")
        end = ("peer", "name", _CABLE, "netns", str(holder.pid))
        for where, command in (
            ((), ("link", "add", _CABLE, "type", "veth", *end)),
            ((), ("addr", "add", f"{_HERE}/24", "dev", _CABLE)),
            ((), ("link", "set", _CABLE, "up")),
            (through, ("addr", "add", f"{_THERE}/24", "dev", _CABLE)),
            (through, ("link", "set", _CABLE, "up")),
            (through, ("link", "set", "lo", "up")),
        ):
            subprocess.run([*where, "ip", *command], check=True)
        yield through
    finally:
        holder.kill()
        holder.wait()


def start_apart(model: Path, how: str, role: str, side: Side, through: tuple[str, ...]) -> Program:
    """Start P in the other namespace or D in ours; the client that asks P is in ours, too."""
    kind = ALL_KINDS[side.kind]
    host = _THERE if role == "prefill" else _HERE
    argv = [*serve_argv(model, role, how, side, kind), "--host", host]
    argv += ["--kv-host", host, "--kv-allow-no-secret"]
    return Program(argv, environment=kind.environment, through=through if role == "prefill" else ())


def write_wide_model(folder: Path) -> Path:
    """A model with 24 KiB of KV per token, 12 MB per prompt; requests are small in comparison."""
    return write_model(folder / "wide", "llama", dtype="bfloat16", num_hidden_layers=4, **_SHAPE)


async def bytes_by_kv(model: Path, how: str, prefill: Served, decode: Served, salt: str) -> float:
    """Bytes that one prompt puts on the cable, HTTP and side channel included, per byte of its KV.

    Raises:
        AssertionError: the ratio is above LIMIT.
    """
    await ask_across(prefill, decode, how, prompt_of(40), salt=salt)  # makes the handshake
    before = _cable_bytes()
    await ask_across(prefill, decode, how, prompt_of(NUM_TOKENS), salt=salt)
    crossed = _cable_bytes() - before
    await check_idle(prefill)
    await check_idle(decode)
    geometry = kv_geometry(read_model_config(model), torch.bfloat16)
    ratio = crossed / (geometry.token_bytes * NUM_TOKENS)
    assert ratio <= LIMIT, f"{crossed} bytes crossed, {ratio:.4f} of the KV"
    return ratio


def _cable_bytes() -> int:
    """Bytes received and sent."""
    [line] = [row for row in Path("/proc/net/dev").read_text().splitlines() if f"{_CABLE}:" in row]
    fields = line.partition(":")[2].split()
    return int(fields[0]) + int(fields[8])
