"""Transfers of a prompt's KV from a prefill instance's ranks to a decode instance's rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace

import numpy as np

from mooncake_hal.kv.geometry import KVGeometry, shard_of
from mooncake_hal.kv.layout import layout_bytes, make_layout
from mooncake_hal.kv.transfer_plan import (
    BlockTransfer,
    KVShardSpec,
    PeerSpans,
    intersect,
    plan_transfer,
)
from mooncake_hal.testing.transports_buffers import Buffer, load_transport, resolve
from mooncake_hal.testing.transports_peer import PeerProcess
from mooncake_hal.transport import EndpointOptions, MemoryRegion, Peer

CONNECT_SECONDS = 60.0


@dataclass(frozen=True)
class KVTransferCase:
    """The KV that the first decode rank reads.

    Args:
        geometry: the model's.
        layout: of the KV on both sides.
        prefill_ranks, decode_ranks: tensor-parallel ranks of the two instances.
        tokens: length of the prompt, a multiple of ``block_size``.
        block_size: of both sides.
    """

    geometry: KVGeometry
    layout: str
    prefill_ranks: int
    decode_ranks: int
    tokens: int
    block_size: int = 16

    @property
    def reader(self) -> KVShardSpec:
        """The decode rank's KV shard, with its pool at address 0."""
        return self._placement(self.decode_ranks, 0)

    @property
    def writers(self) -> list[KVShardSpec]:
        """The shards of the prefill ranks that it reads from, with their pools at address 0."""
        everyone = (self._placement(self.prefill_ranks, rank) for rank in range(self.prefill_ranks))
        wanted = self.reader.shard
        return [rank for rank in everyone if intersect(wanted, rank.shard).heads]

    def pool_bytes(self, shard_spec: KVShardSpec) -> int:
        """Bytes of a rank's pool that holds exactly the prompt."""
        blocks = self.tokens // self.block_size
        return layout_bytes(self.geometry, shard_spec.shard, blocks, self.block_size)

    def plan(self, local: MemoryRegion, remotes: Sequence[MemoryRegion]) -> list[PeerSpans]:
        """The planner's transfer plan; block tables are shuffled on both sides.

        Args:
            local: address of the reader's pool.
            remotes: addresses of the writers' pools, in their order.
        """
        rng, blocks = np.random.default_rng(1), self.tokens // self.block_size
        near, far = (rng.permutation(blocks).tolist() for _ in range(2))
        writers = [_at(rank, pool) for rank, pool in zip(self.writers, remotes, strict=True)]
        movement = BlockTransfer(near, far, (0, self.tokens))
        return plan_transfer(self.geometry, _at(self.reader, local), writers, movement)

    def _placement(self, ranks: int, rank: int) -> KVShardSpec:
        shard = shard_of(self.geometry, ranks, rank)
        blocks = self.tokens // self.block_size
        layout = make_layout(self.layout, self.geometry, shard, blocks, self.block_size)
        return KVShardSpec(shard, layout)


@dataclass(frozen=True)
class Reader:
    """The decode rank, connected to the prefill ranks' processes."""

    pool: Buffer
    remotes: list[MemoryRegion]
    peers: list[Peer]
    plans: list[PeerSpans]

    def read(self, timeout: float = 60.0) -> None:
        """Read everything and wait for completion."""
        transfers = [self.peers[plan.peer].read(plan.spans, timeout=timeout) for plan in self.plans]
        for transfer in transfers:
            transfer.wait()


@contextmanager
def reading(
    case: KVTransferCase, loader: str, allocator: str, options: EndpointOptions
) -> Iterator[Reader]:
    """Both sides for the duration of a block; prefill rank n holds ``content(1 + n, ...)``.

    Args:
        case: the KV to read.
        loader, allocator: see ``PeerProcess``.
        options: of all endpoints.
    """
    with ExitStack() as stack:
        pool = resolve(allocator)(case.pool_bytes(case.reader))
        stack.callback(pool.close)
        endpoint = stack.enter_context(closing(load_transport(loader).open(options)))
        endpoint.register(pool.region)
        remotes, peers = [], []
        for number, writer in enumerate(case.writers):
            nbytes = case.pool_bytes(writer)
            child = PeerProcess(loader, allocator, options, nbytes, seed=1 + number)
            stack.enter_context(closing(child))
            remotes.append(child.region)
            peers.append(endpoint.connect(child.address, timeout=CONNECT_SECONDS))
        yield Reader(pool, remotes, peers, case.plan(pool.region, remotes))


def _at(shard_spec: KVShardSpec, pool: MemoryRegion) -> KVShardSpec:
    return replace(shard_spec, layout=shard_spec.layout.shifted(pool.address))
