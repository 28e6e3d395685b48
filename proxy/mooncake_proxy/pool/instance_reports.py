"""What an instance's health endpoint reports about itself, its peers and its stores."""

from __future__ import annotations

import re

from msgspec import Struct

# The host of a ZMQ address that listens on all interfaces.
_WILDCARD = re.compile(r"(?<=^tcp://)(\*|0\.0\.0\.0|\[::\]|::)(?=:\d+$)")


class KVEventEndpoints(Struct, frozen=True):
    """ZMQ addresses at which an instance publishes which blocks it holds (`--kv-events-config`)."""

    endpoint: str
    replay_endpoint: str | None = None
    # Endpoints of its data-parallel ranks from the second one on.
    other_dp_ranks: tuple[KVEventEndpoints, ...] = ()
    # For a node store: the namespace of the events that belong to the instance's model.
    namespace: str | None = None

    @classmethod
    def of_ranks(
        cls, host: str, port: int, replay_port: int | None, num_ranks: int
    ) -> KVEventEndpoints:
        """Endpoints of data-parallel ranks, each at the ports of the first one plus its number, as
        vLLM's are."""
        first, *others = (
            cls(
                f"tcp://{host}:{port + rank}",
                None if replay_port is None else f"tcp://{host}:{replay_port + rank}",
            )
            for rank in range(num_ranks)
        )
        return cls(first.endpoint, first.replay_endpoint, tuple(others))

    def with_host(self, host: str) -> KVEventEndpoints:
        """These endpoints with `host` in place of wildcard addresses."""
        replay = self.replay_endpoint
        return KVEventEndpoints(
            _WILDCARD.sub(host, self.endpoint),
            None if replay is None else _WILDCARD.sub(host, replay),
            tuple(rank.with_host(host) for rank in self.other_dp_ranks),
            self.namespace,
        )


class StoreLocation(Struct, frozen=True):
    """Address of a node store, and the store's epoch.

    After a restart, in a new epoch, the store holds nothing of what was published before.
    """

    host: str
    port: int
    epoch: str


class PoolUse(Struct, frozen=True):
    """An instance's use of the KVCache pool.

    `store`, `kv_events` and `metrics` are of the first store in its configuration, to which it
    saves, and None while that can't be used: then saves go to the first of `other_stores`, which
    are the others that can be used. `store` is None, too, if other instances can't read what it
    saves, and `kv_events` if the store does not publish what it holds. `metrics` is HOST:PORT of a
    store's own metrics.
    """

    store: StoreLocation | None = None
    kv_events: KVEventEndpoints | None = None
    metrics: str | None = None
    other_stores: tuple[PoolUse, ...] = ()


class Compatibility(Struct, frozen=True):
    """What an instance's health endpoint reports: peers that it can't exchange KV with, where its
    events are, and its use of the KVCache pool. All fields are empty by default."""

    # Identifies this start of the instance (epoch).
    engine_id: str = ""
    # Engine ids of peers that it can't exchange KV with.
    refused_peers: frozenset[str] = frozenset()
    kv_events: KVEventEndpoints | None = None
    kv_pool: PoolUse | None = None
    # Number of its data-parallel ranks; 0 if not reported.
    data_parallel_size: int = 0
    # Whether it continues another instance's answer in its middle (`generated_token_ids`).
    continues_answers: bool = False


class PoolReport(Struct, frozen=True):
    """An instance's KVCache pool counters from its health endpoint, in chunks since its start."""

    saved: int = 0
    # Lookup hits by tier.
    found: dict[str, int] = {}
