"""Interface for code that runs in each worker next to the KV pool, such as a KV connector.

An executor builds one extension per rank, in the rank's process, and carries opaque messages
between it and the core; it never looks inside them. ``Executor.send`` reaches ``receive``, and
``ExtensionContext.emit`` reaches the callback that the executor was given. In-process ranks use
the same seam, so an extension can't tell where it runs.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, cast

from mooncake_engine.config import EngineConfig
from mooncake_engine.errors import ConfigError
from mooncake_engine.kv_cache.kv_pool import KVPool
from mooncake_engine.scheduling.step_plan import StepPlan
from mooncake_hal.backend import Backend
from mooncake_hal.registry import Registry

LayerDone = Callable[[int], None]
"""Called with a held layer's number in the model once its KV of the step is enqueued."""

MessageHandler = Callable[[int, bytes], None]
"""Takes ``(rank, message)`` from an extension; called from any thread, must not block."""


@dataclass(frozen=True, slots=True)
class ExtensionContext:
    """What an extension gets to work with.

    Args:
        rank, num_ranks: which rank of the instance this is, of how many.
        device: the rank's device index.
        pool: its KV memory, alive until the extension's ``close`` has returned.
        backend: its hardware; helper threads call ``backend.runtime.bind_thread`` first.
        registry: transports, as the rank's process has found them.
        config: the instance's configuration.
        emit: sends a message to the core. Any thread; never blocks for long.
        fail: a background thread of the extension died of this; the instance ends with it.
    """

    rank: int
    num_ranks: int
    device: int
    pool: KVPool
    backend: Backend
    registry: Registry
    config: EngineConfig
    emit: Callable[[bytes], None]
    fail: Callable[[BaseException], None]


class WorkerExtension(Protocol):
    """One rank's extension."""

    def receive(self, message: bytes) -> None:
        """Take a message from the core; long work goes to the extension's own threads.

        Never called by two threads at once, but possibly while a step runs. An exception from
        here ends the instance.
        """
        ...

    def begin_step(self, plan: StepPlan) -> LayerDone | None:
        """Called in the step's thread before the model runs; returns the layer hook, if it wants
        one."""
        ...

    def close(self) -> None:
        """Stop all threads and withdraw the pool's memory from peers. Idempotent."""
        ...


ExtensionFactory = Callable[[ExtensionContext], WorkerExtension]


def load_extension(name: str) -> ExtensionFactory:
    """Import the factory called ``"package.module:attribute"``.

    A name and not an object, so that a rank in another process can import it.

    Raises:
        ConfigError: there is no such factory.
    """
    module_name, _, attribute = name.partition(":")
    try:
        factory = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError, ValueError) as exc:
        raise ConfigError(
            f"worker extension {name!r} can't be loaded: {exc}; wanted 'package.module:factory'"
        ) from exc
    return cast(ExtensionFactory, factory)
