"""An instance's KV events over real sockets, with losses, duplicates, late batches and restarts."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import msgspec
import zmq

from mooncake_conductor.index.prompt_keys import token_keys

BLOCK = 16
END = (-1).to_bytes(8, "big", signed=True)


class FaultyPublisher:
    """Stores and evicts prompts of 16-token blocks, last blocks first. `held` is the ground truth.

    Args:
        seed: of the faults.
        loss: share of live batches that are lost; as many are duplicated, and as many sent one
            batch too late.
        num_kept: batches kept for replays; None: replay requests are not answered.
        has_snapshots: whether snapshot requests return everything that it holds.
        delay_s: before each answer.
    """

    def __init__(
        self,
        seed: int,
        *,
        loss: float = 0.2,
        num_kept: int | None = 10_000,
        has_snapshots: bool = False,
        delay_s: float = 0.0,
    ) -> None:
        self._rng = random.Random(seed)
        self._loss, self._num_kept = loss, num_kept
        self._has_snapshots = has_snapshots
        self.delay_s = delay_s
        self._context = zmq.Context()
        self._pub = self._context.socket(zmq.PUB)
        self.port = self._pub.bind_to_random_port("tcp://127.0.0.1")
        self._router = self._context.socket(zmq.ROUTER)
        self.replay_port = self._router.bind_to_random_port("tcp://127.0.0.1")
        self._sent: list[tuple[int, bytes]] = []
        self._next = 0
        self._published_at = time.time()
        self._late: list[tuple[int, bytes]] = []
        self.held: dict[int, tuple[tuple[int, ...], int | None]] = {}
        self._stop = threading.Event()
        self._lock = threading.RLock()
        self._thread = threading.Thread(target=self._answer_replays, daemon=True)
        self._thread.start()

    def keys(self) -> set[int]:
        """Keys of the chunks that it holds completely."""
        return {key for prefix, _ in self.held.values() for key in token_keys(prefix)}

    def store(self, ids: list[int]) -> None:
        """Store a prompt's blocks, as after a prefill."""
        parent: int | None = None
        for end in range(BLOCK, len(ids) + 1, BLOCK):
            name = _name(ids[:end])
            if name not in self.held:
                with self._lock:
                    self.held[name] = (tuple(ids[:end]), parent)
                    self._publish([_stored(name, ids[:end], parent)])
            parent = name

    def store_for(self, adapter: str, ids: list[int]) -> None:
        """Store the blocks of a prompt with an adapter, for good and apart from ``held``."""
        parent: int | None = None
        for end in range(BLOCK, len(ids) + 1, BLOCK):
            name = _name(ids[:end]) ^ 1
            event = _stored(name, ids[:end], parent)
            self._publish([event | {"lora_id": 1, "lora_name": adapter, "extra_keys": [[adapter]]}])
            parent = name

    def evict(self, count: int) -> None:
        """Evict blocks that no other block follows."""
        for _ in range(count):
            parents = {parent for _, parent in self.held.values()}
            leaf = next((name for name in self.held if name not in parents), None)
            if leaf is None:
                return
            with self._lock:
                del self.held[leaf]
                self._publish([{"type": "BlockRemoved", "block_hashes": [leaf], "medium": "GPU"}])

    def clear(self) -> None:
        """Reset the prefix cache."""
        with self._lock:
            self.held.clear()
            self._publish([{"type": "AllBlocksCleared"}])

    def restart(self) -> None:
        """Start a new epoch at the same address: numbers restart at 0 and nothing is held."""
        with self._lock:
            self.held.clear()
            self._sent.clear()
            self._late.clear()
            self._next = 0
            self._published_at = time.time()

    def settle(self) -> None:
        """Publish one last batch that arrives, so that subscribers detect any gap."""
        loss, self._loss = self._loss, 0.0
        self._publish([])
        self._publish([])
        self._loss = loss

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self._context.destroy(linger=0)

    def _publish(self, events: list[dict]) -> None:
        with self._lock:
            self._published_at = time.time()
            payload = msgspec.msgpack.encode([self._published_at, events, 0])
            message = (self._next, payload)
            self._next += 1
            self._sent.append(message)
            if self._num_kept is not None:
                del self._sent[: -self._num_kept]
            fate = self._rng.random()
            if fate < self._loss:
                return
            if fate < 2 * self._loss:
                self._late.append(message)
                return
            for each in (message, *self._late, *([message] if fate < 3 * self._loss else [])):
                self._send(each)
            self._late.clear()

    def _snapshot(self) -> list[tuple[int, bytes]]:
        """Everything that it holds, one message per block."""
        if not self._has_snapshots:
            return []
        held = [_stored(name, *what) for name, what in self.held.items()]
        events = [{"type": "AllBlocksCleared"}, *held]
        at = self._published_at
        return [(self._next, msgspec.msgpack.encode([at, [event], 0])) for event in events]

    def _send(self, message: tuple[int, bytes]) -> None:
        sequence, payload = message
        self._pub.send_multipart((b"", sequence.to_bytes(8, "big"), payload))

    def _answer_replays(self) -> None:
        while not self._stop.is_set():
            if not self._router.poll(10):
                continue
            client, empty, start = self._router.recv_multipart()
            time.sleep(self.delay_s)
            if self._num_kept is None:
                continue
            with self._lock:
                kept = self._snapshot() if start == b"snapshot" else list(self._sent)
            for sequence, payload in kept:
                if start == b"snapshot" or sequence >= int.from_bytes(start, "big"):
                    number = sequence.to_bytes(8, "big")
                    self._router.send_multipart((client, empty, b"", number, payload))
            self._router.send_multipart((client, empty, b"", END, b""))


def _stored(name: int, prefix: Sequence[int], parent: int | None) -> dict[str, Any]:
    """The event for a prompt's last block."""
    return {
        "type": "BlockStored",
        "block_hashes": [name],
        "block_size": BLOCK,
        "parent_block_hash": parent,
        "token_ids": list(prefix[-BLOCK:]),
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
    }


def _name(prefix: list[int]) -> int:
    data = repr(prefix).encode()
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "big")
