"""KV events: instances and stores tell routers which blocks they hold, in vLLM's format.

A batch is msgpack of ``[ts, events, data_parallel_rank]``, each event a map with a ``type`` (vLLM
since 0.24; read by Dynamo, llm-d and mooncake-conductor). ``kv_event_publisher`` sends them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

_KEY_MASK = (1 << 64) - 1
MEDIUM_GPU = "GPU"
"""The device's memory, whatever device it is: the field's word."""
MEDIUM_CPU, MEDIUM_STORAGE = "CPU", "STORAGE"
"""Of node stores: host memory and SSDs, as vLLM calls them (0.30 to 0.33). SGLang, and releases of
ours before, say DISK of the latter."""


class _Event(msgspec.Struct, omit_defaults=True, gc=False, tag=True, frozen=True):
    """As vLLM writes it: a map that begins with its type."""


class BlockStored(_Event, frozen=True):
    """Full blocks that can be reused from now on, one behind the other.

    Args:
        block_hashes: the low 64 bits of each block's name.
        parent_block_hash: of the block before the first; None at the beginning of a prompt.
        token_ids: of all these blocks; empty where the publisher does not know them, or has said
            them before.
        block_size: tokens per block.
        lora_id, lora_name: adapter.
        medium: where they lie.
        extra_keys: what each block depends on besides; the first of a prompt on its cache salt.
        namespace: of a store that several models use: whose KV it is, see ``KVIdentity.root``;
            readers that don't know it leave it alone.
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
    """Where an instance publishes, as its health says it; a wildcard means the instance's host.

    Args:
        endpoint: of the PUB socket.
        replay_endpoint: of the ROUTER socket, if there is one.
        other_dp_ranks: of data-parallel ranks from the second one on.
        namespace: of a store: which of its events are of the instance's model.
    """

    endpoint: str
    replay_endpoint: str | None = None
    other_dp_ranks: tuple[KVEventEndpoints, ...] = ()
    namespace: str | None = None


def event_key(digest: bytes) -> int:
    """A block's name as events carry it: the low 64 bits."""
    return int.from_bytes(digest, "big") & _KEY_MASK


def encode_batch(events: Sequence[KVEvent], published_at: float, dp_rank: int = 0) -> bytes:
    """The third frame."""
    return msgspec.msgpack.encode([published_at, events, dp_rank])


class KVEventLog:
    """Collects a step's events and hands them to the publisher in one batch; what an engine's pool
    of blocks reports to.

    Args:
        publish: takes a batch.
        block_size: tokens per block.
        on_close: ends what publishes.
        endpoints: where subscribers find what is published.
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
        """Where subscribers find what is published."""
        return self._endpoints

    def stored(
        self,
        digests: Sequence[bytes],
        parent: bytes | None,
        token_ids: Sequence[int],
        cache_salt: str = "",
    ) -> None:
        """These blocks, one behind the other, can be found from now on."""
        extra_keys: list[list[str] | None] | None = None
        if cache_salt and parent is None:
            extra_keys = [[cache_salt], *[None] * (len(digests) - 1)]
        self._end_removals()
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
        """This block is found no more."""
        self._removed.append(event_key(digest))

    def cleared(self) -> None:
        """No block is found any more."""
        self._removed.clear()
        self._events = [AllBlocksCleared()]

    def flush(self) -> None:
        """The step is over: publish what happened in it, if anything did."""
        self._end_removals()
        if self._events:
            events, self._events = self._events, []
            self._publish(events)

    def close(self) -> None:
        """Publish what is left, and end what publishes. Idempotent."""
        self.flush()
        if self._on_close is not None:
            self._on_close()
            self._on_close = None

    def _end_removals(self) -> None:
        if self._removed:
            self._events.append(BlockRemoved(self._removed, MEDIUM_GPU))
            self._removed = []
