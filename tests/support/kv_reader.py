"""The decode side of a KV transfer in a process of its own, which needs no torch.

``python -m support.kv_reader`` reads one JSON line on stdin, pulls the KV that it describes, and
writes each rank's whole pool to a file.
"""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mooncake_hal.kv.geometry import AttentionKind, KVGeometry, shard_of
from mooncake_hal.kv.layout import layout_bytes, make_layout
from mooncake_hal.kv.transfer_plan import BlockTransfer, KVShardSpec, plan_transfer
from mooncake_hal.testing.transports_buffers import anonymous, load_transport
from mooncake_hal.testing.transports_peer import content
from mooncake_hal.transport import EndpointOptions

GEOMETRY = KVGeometry(AttentionKind.GQA, 4, 4, (16, 16), "bfloat16", 2)
TESTS = Path(__file__).parents[1]
SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Side:
    """The layout and sizes of an instance's KV: a key of KV_LAYOUTS, and sizes."""

    tp_size: int
    block_size: int
    num_blocks: int
    layout: str

    def pool_bytes(self, rank: int) -> int:
        """Bytes of a rank's pool."""
        shard = shard_of(GEOMETRY, self.tp_size, rank)
        return layout_bytes(GEOMETRY, shard, self.num_blocks, self.block_size)

    def shard_spec(self, rank: int, base: int) -> KVShardSpec:
        """The KV shard of a rank whose pool begins at ``base``."""
        shard = shard_of(GEOMETRY, self.tp_size, rank)
        layout = make_layout(self.layout, GEOMETRY, shard, self.num_blocks, self.block_size)
        return KVShardSpec(shard, layout.shifted(base))


@dataclass(frozen=True, slots=True)
class KVTransferCase:
    """Everything that the reader needs to know.

    Args:
        transport: ``"module:loader"``.
        prefill, decode: both sides.
        addresses, bases: each prefill rank's endpoint, in hexadecimal, and the address of its pool.
        prefill_blocks, decode_blocks: block tables.
        tokens: half-open range to move.
    """

    transport: str
    prefill: Side
    decode: Side
    addresses: list[str]
    bases: list[int]
    prefill_blocks: list[int]
    decode_blocks: list[int]
    tokens: tuple[int, int]


def pull_elsewhere(case: KVTransferCase, folder: Path) -> list[np.ndarray[Any, np.dtype[np.uint8]]]:
    """Pull in another process; returns the bytes of every decode rank's pool afterwards."""
    command = [sys.executable, "-m", "support.kv_reader", str(folder)]
    text = json.dumps(asdict(case))
    subprocess.run(command, input=text, text=True, cwd=TESTS, check=True, timeout=4 * SECONDS)
    return [np.load(folder / f"{rank}.npy") for rank in range(case.decode.tp_size)]


def pull(case: KVTransferCase, rank: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Pull one rank's part into a pool of ``content(rank)``; return the pool's bytes."""
    nbytes = case.decode.pool_bytes(rank)
    with ExitStack() as stack:
        pool = anonymous(nbytes)
        stack.callback(pool.close)
        pool.put(content(rank, nbytes))
        endpoint = load_transport(case.transport).open(EndpointOptions(secret=b"secret"))
        stack.callback(endpoint.close)
        endpoint.register(pool.region)
        remotes = [case.prefill.shard_spec(at, base) for at, base in enumerate(case.bases)]
        movement = BlockTransfer(case.decode_blocks, case.prefill_blocks, case.tokens)
        local = case.decode.shard_spec(rank, pool.region.address)
        transfers = []
        for plan in plan_transfer(GEOMETRY, local, remotes, movement):
            address = bytes.fromhex(case.addresses[plan.peer])
            peer = endpoint.connect(address, timeout=SECONDS)
            transfers.append(peer.read(plan.spans, timeout=SECONDS))
        for transfer in transfers:
            transfer.wait()
        return pool.get()


def main() -> None:
    """Pull every rank's part, one after the other."""
    described = json.load(sys.stdin)
    sides = {name: Side(**described.pop(name)) for name in ("prefill", "decode")}
    case = KVTransferCase(**described, **sides)
    for rank in range(case.decode.tp_size):
        np.save(Path(sys.argv[1]) / f"{rank}.npy", pull(case, rank))


if __name__ == "__main__":
    main()
