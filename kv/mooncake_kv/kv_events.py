"""KV events, by which instances and stores notify routers of the blocks that they hold, in vLLM's
format.

A batch is msgpack of ``[ts, events, data_parallel_rank]``, each event a map with a ``type`` (vLLM
since 0.24; read by Dynamo, llm-d and mooncake-conductor). ``kv_event_publisher`` sends them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

_KEY_MASK = (1 << 64) - 1
MEDIUM_GPU = "GPU"
"""The memory of any device; other systems use this name for every vendor."""
MEDIUM_CPU, MEDIUM_STORAGE = "CPU", "STORAGE"
"""Media of node stores: host memory and SSDs, named as in vLLM (0.30 to 0.33). SGLang, and earlier
releases of ours, call the latter DISK."""


class _Event(msgspec.Struct, omit_defaults=True, gc=False, tag=True, frozen=True):
    """Encoded as in vLLM: a map that begins with its type."""


class BlockStored(_Event, frozen=True):
    """Consecutive full blocks that can be reused from now on.

    Args:
        block_hashes: the low 64 bits of each block's hash.
        parent_block_hash: hash of the block before the first; None at the beginning of a prompt.
        token_ids: tokens of all these blocks; empty if the publisher does not know them, or has
            published them before.
        block_size: tokens per block.
        lora_id, lora_name: the adapter.
        medium: the medium that holds the blocks.
        extra_keys: what else each block depends on; the first block of a prompt, on its cache salt.
        namespace: in a store that several models use, the model whose KV it is: see
            ``KVIdentity.root``. Subscribers that don't know the field ignore it.
    """

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[list[str] | None] | None = None
    namespace: str | None = None


class BlockRemoved(_Event, frozen=True):
    """Blocks that can no longer be reused."""

    block_hashes: list[int]
    medium: str | None


class AllBlocksCleared(_Event, frozen=True):
    """No block can be reused any more."""


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared


class KVEventEndpoints(msgspec.Struct, frozen=True, omit_defaults=True):
    """The addresses on which an instance publishes, as reported by its health endpoint; a wildcard
    means the instance's host.

    Args:
        endpoint: address of the PUB socket.
        replay_endpoint: address of the ROUTER socket, if there is one.
        other_dp_ranks: endpoints of the data-parallel ranks from the second one on.
        namespace: of a store: the namespace of the instance's model in its events.
    """

    endpoint: str
    replay_endpoint: str | None = None
    other_dp_ranks: tuple[KVEventEndpoints, ...] = ()
    namespace: str | None = None


def event_key(digest: bytes) -> int:
    """A block's hash in events: the low 64 bits of its digest."""
    return int.from_bytes(digest, "big") & _KEY_MASK


def encode_batch(events: Sequence[KVEvent], published_at: float, dp_rank: int = 0) -> bytes:
    """Encode a batch: the third frame of a message."""
    return msgspec.msgpack.encode([published_at, events, dp_rank])


class KVEventLog:
    """Collects the events of a step, which an engine's block pool reports, and passes them to the
    publisher in one batch.

    Args:
        publish: publishes a batch.
        block_size: tokens per block.
        on_close: closes the publisher.
        endpoints: the publisher's endpoints.
    """

    def __init__(
        self,
        publish: Callable[[list[KVEvent]], None],
        block_size: int,
        on_close: Callable[[], None] | None = None,
        endpoints: KVEventEndpoints | None = None,
    ) -> None:
        self._endpoints = endpoints
        self._publish = publish
        self._on_close = on_close
        self._block_size = block_size
        self._events: list[KVEvent] = []
        self._removed: list[int] = []

    @property
    def endpoints(self) -> KVEventEndpoints | None:
        """The publisher's endpoints, for subscribers."""
        return self._endpoints

    def stored(
        self,
        digests: Sequence[bytes],
        parent: bytes | None,
        token_ids: Sequence[int],
        cache_salt: str = "",
    ) -> None:
        """Record that consecutive blocks were added to the prefix cache."""
        extra_keys: list[list[str] | None] | None = None
        if cache_salt and parent is None:
            extra_keys = [[cache_salt], *[None] * (len(digests) - 1)]
        self._flush_removals()
        stored = BlockStored(
            [event_key(digest) for digest in digests],
            None if parent is None else event_key(parent),
            list(token_ids),
            self._block_size,
            None,
            MEDIUM_GPU,
            None,
            extra_keys,
        )
        self._events.append(stored)

    def removed(self, digest: bytes) -> None:
        """Record that a block was removed from the prefix cache."""
        self._removed.append(event_key(digest))

    def cleared(self) -> None:
        """Record that the prefix cache was cleared."""
        self._removed.clear()
        self._events = [AllBlocksCleared()]

    def flush(self) -> None:
        """Publish the events of the step, if there are any."""
        self._flush_removals()
        if self._events:
            events, self._events = self._events, []
            self._publish(events)

    def close(self) -> None:
        """Publish the remaining events, and close the publisher. Idempotent."""
        self.flush()
        if self._on_close is not None:
            self._on_close()
            self._on_close = None

    def _flush_removals(self) -> None:
        if self._removed:
            self._events.append(BlockRemoved(self._removed, MEDIUM_GPU))
            self._removed = []
