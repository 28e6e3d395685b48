"""Interface for code that runs in each worker next to the KV cache, such as a KV connector.

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
from mooncake_engine.kv_cache.kv_cache_memory import KVCacheMemory
from mooncake_engine.scheduling.step_plan import StepPlan
from mooncake_hal.backend import Backend
from mooncake_hal.registry import Registry
from mooncake_kv.connector_worker import SharedTransports

LayerDone = Callable[[int], None]
"""The layer hook: called with the model's number of a layer of this rank, once the KV writes of the
step to that layer are enqueued."""

MessageHandler = Callable[[int, bytes], None]
"""Called with ``(rank, message)`` for each message of an extension, from any thread; must not
block."""


@dataclass(frozen=True, slots=True)
class ExtensionContext:
    """The environment of an extension.

    Args:
        rank, num_ranks: number of the rank, and how many ranks there are.
        device: index of the rank's device.
        pool: the rank's KV cache, valid until the extension's ``close`` has returned.
        backend: the backend of the rank's device; threads of the extension must call
            ``backend.runtime.bind_thread`` first.
        registry: the transports that the rank's process has discovered.
        config: config of the instance.
        emit: sends a message to the core. Any thread; never blocks for long.
        fail: to be called with the error that ended a thread of the extension; ends the instance.
        shared: transports that one extension has opened and the others may use too.
    """

    rank: int
    num_ranks: int
    device: int
    pool: KVCacheMemory
    backend: Backend
    registry: Registry
    config: EngineConfig
    emit: Callable[[bytes], None]
    fail: Callable[[BaseException], None]
    shared: SharedTransports = field(default_factory=SharedTransports)


class WorkerExtension(Protocol):
    """One rank's extension."""

    def receive(self, message: bytes) -> None:
        """Handle a message from the core. Long work belongs in the extension's own threads.

        Never called by two threads at once, but possibly while a step runs. An exception ends the
        instance.
        """
        ...

    def begin_step(self, plan: StepPlan) -> LayerDone | None:
        """Called before each step, in the thread that launches steps. Returns the step's layer
        hook, or None."""
        ...

    def close(self) -> None:
        """Stop all threads and revoke the peers' access to the pool's memory. Idempotent."""
        ...


ExtensionFactory = Callable[[ExtensionContext], WorkerExtension]


def load_extension(name: str) -> ExtensionFactory:
    """Import the factory ``"package.module:attribute"``, or several separated by commas, which are
    combined: see ``CombinedExtension``.

    It takes a name rather than an object, so that a rank in another process can import it.

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
    """Several extensions of a rank as one. The first byte of a message, in both directions, is the
    number of its extension; see ``ExtensionMessages`` for the core's side.

    Args:
        context: the environment of the rank's extensions.
        factories: the extensions, by number; their layer hooks are called in this order.
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
        """Pass a message to its extension."""
        self._extensions[message[0]].receive(message[1:])

    def begin_step(self, plan: StepPlan) -> LayerDone | None:
        """One hook that calls those of all extensions; None if there are none."""
        found = [extension.begin_step(plan) for extension in self._extensions]
        hooks = [hook for hook in found if hook is not None]
        if len(hooks) < 2:
            return hooks[0] if hooks else None

        def layer_done(layer: int) -> None:
            for hook in hooks:
                hook(layer)

        return layer_done

    def close(self) -> None:
        """Close all extensions, the last one first. Idempotent."""
        for extension in reversed(self._extensions):
            extension.close()


def _emit_as(emit: Callable[[bytes], None], number: int, message: bytes) -> None:
    emit(bytes((number,)) + message)


class ExtensionMessages:
    """The core's side of the extensions: routes their messages. If there are several, the first
    byte of a message is the number of its extension."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._handlers: list[MessageHandler] = []

    def add(self, name: str, handler: MessageHandler) -> int:
        """Add an extension; returns its number.

        Args:
            name: name of its factory.
            handler: called with its messages.
        """
        self._names.append(name)
        self._handlers.append(handler)
        return len(self._names) - 1

    def number(self, name: str) -> int:
        """The number of an extension that was added."""
        return self._names.index(name)

    @property
    def factories(self) -> str | None:
        """The names of all factories, for ``load_extension``; None if there are no extensions."""
        return ",".join(self._names) if self._names else None

    def handle_message(self, rank: int, message: bytes) -> None:
        """Pass a message from a rank to the handler of its extension."""
        if len(self._names) > 1:
            self._handlers[message[0]](rank, message[1:])
        else:
            self._handlers[0](rank, message)

    def sender(
        self, number: int, send: Callable[[bytes, int], None]
    ) -> Callable[[bytes, int], None]:
        """A function that sends one extension's messages to ranks.

        Args:
            number: number of the extension.
            send: the executor's ``send``.
        """
        if len(self._names) < 2:
            return send
        prefix = bytes((number,))
        return lambda message, rank: send(prefix + message, rank)
