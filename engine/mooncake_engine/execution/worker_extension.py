"""Interface for code that runs in each worker next to the KV pool, such as a KV connector.

An executor builds one extension per rank, in the rank's process, and carries opaque messages
between it and the core; it never looks inside them. ``Executor.send`` reaches ``receive``, and
``ExtensionContext.emit`` reaches the callback that the executor was given. In-process ranks use
the same seam, so an extension can't tell where it runs.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol, cast

from mooncake_engine.config import EngineConfig
from mooncake_engine.errors import ConfigError
from mooncake_engine.kv_cache.kv_pool import KVPool
from mooncake_engine.scheduling.step_plan import StepPlan
from mooncake_hal.backend import Backend
from mooncake_hal.registry import Registry
from mooncake_kv.connector_worker import SharedTransports

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
        shared: transports that one extension has opened, and others may use, too.
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
    shared: SharedTransports = field(default_factory=SharedTransports)


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
    """Import the factory called ``"package.module:attribute"``, or several with commas between
    them: see ``CombinedExtension``.

    A name and not an object, so that a rank in another process can import it.

    Raises:
        ConfigError: there is no such factory.
    """
    if "," in name:
        factories = [load_extension(part) for part in name.split(",")]
        return lambda context: CombinedExtension(context, factories)
    module_name, _, attribute = name.partition(":")
    try:
        factory = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError, ValueError) as exc:
        raise ConfigError(
            f"worker extension {name!r} can't be loaded: {exc}; wanted 'package.module:factory'"
        ) from exc
    return cast(ExtensionFactory, factory)


class CombinedExtension:
    """Several extensions of a rank as one. The first byte of a message says whose it is, in both
    directions: see ``ExtensionMessages`` for the core's end.

    Args:
        context: of the rank.
        factories: in the order of their numbers, and of their layer hooks.
    """

    def __init__(self, context: ExtensionContext, factories: Sequence[ExtensionFactory]) -> None:
        self._extensions: list[WorkerExtension] = []
        try:
            for number, factory in enumerate(factories):
                emit = partial(_emit_as, context.emit, number)
                self._extensions.append(factory(replace(context, emit=emit)))
        except BaseException:
            self.close()
            raise

    def receive(self, message: bytes) -> None:
        """Hand a message to the extension that it is for."""
        self._extensions[message[0]].receive(message[1:])

    def begin_step(self, plan: StepPlan) -> LayerDone | None:
        """The hooks of all that want one, in their order."""
        found = [extension.begin_step(plan) for extension in self._extensions]
        hooks = [hook for hook in found if hook is not None]
        if len(hooks) < 2:
            return hooks[0] if hooks else None

        def layer_done(layer: int) -> None:
            for hook in hooks:
                hook(layer)

        return layer_done

    def close(self) -> None:
        """Close all, the last one first. Idempotent."""
        for extension in reversed(self._extensions):
            extension.close()


def _emit_as(emit: Callable[[bytes], None], number: int, message: bytes) -> None:
    emit(bytes((number,)) + message)


class ExtensionMessages:
    """The core's end of the extensions: with several, a message's first byte says whose it is."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._handlers: list[MessageHandler] = []

    def add(self, name: str, handler: MessageHandler) -> int:
        """An extension by its factory's name, and who takes its messages; returns its number."""
        self._names.append(name)
        self._handlers.append(handler)
        return len(self._names) - 1

    def number(self, name: str) -> int:
        """Of an extension that was added."""
        return self._names.index(name)

    @property
    def factories(self) -> str | None:
        """As ``load_extension`` takes them; None if there are none."""
        return ",".join(self._names) if self._names else None

    def take(self, rank: int, message: bytes) -> None:
        """A message from a rank."""
        if len(self._names) > 1:
            self._handlers[message[0]](rank, message[1:])
        else:
            self._handlers[0](rank, message)

    def sender(
        self, number: int, send: Callable[[bytes, int], None]
    ) -> Callable[[bytes, int], None]:
        """What carries one extension's messages to ranks, over an executor's ``send``."""
        if len(self._names) < 2:
            return send
        prefix = bytes((number,))
        return lambda message, rank: send(prefix + message, rank)
