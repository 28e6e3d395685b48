"""The pools of several models behind one proxy, and the pool that takes a request."""

from __future__ import annotations

from collections.abc import Iterator

from mooncake_proxy.errors import BadRequest, Conflict, ModelNotFound, NotFound
from mooncake_proxy.http1.upstream_connection import ClientContext
from mooncake_proxy.pool.instances import (
    Compatibility,
    Instance,
    InstancePool,
    InstanceSpec,
    Role,
)
from mooncake_proxy.pool.pair_topology import PairTopology


class ModelPools:
    """Instances by model. Who follows files, clusters and health sees them all at once.

    An instance belongs to the pool of the first name that it was declared with; without a name, to
    `unnamed`, which takes every request that no other pool has a name for.
    """

    def __init__(self, context: ClientContext) -> None:
        self._context = context
        self.unnamed = InstancePool(context)
        self._pools: dict[str, InstancePool] = {"": self.unnamed}

    def __iter__(self) -> Iterator[Instance]:
        return (instance for pool in tuple(self._pools.values()) for instance in pool)

    def __len__(self) -> int:
        return sum(len(pool) for pool in self._pools.values())

    @property
    def in_use(self) -> list[InstancePool]:
        """Pools with instances; the unnamed one where none has any."""
        return [pool for pool in self._pools.values() if len(pool)] or [self.unnamed]

    @property
    def names(self) -> list[str]:
        """What requests may call the models, in the order of their pools."""
        return [name for pool in self._pools.values() for name in sorted(pool.model_names)]

    def pool_of(self, model: str | None) -> InstancePool:
        """The pool that serves a model of that name.

        ModelNotFound if none does; BadRequest where there are several and none is named.
        """
        if len(self._pools) == 1:
            return self.unnamed
        if model is not None:
            for pool in self._pools.values():
                if model in pool.model_names:
                    return pool
        if len(self.unnamed):
            return self.unnamed
        if model is not None:
            raise ModelNotFound(model)
        if len(found := self.in_use) == 1:
            return found[0]
        known = ", ".join(self.names)
        raise BadRequest(f"you must provide a model parameter: one of {known}", param="model")

    def home(self, name: str) -> InstancePool:
        """The pool that has this instance, or NotFound with the instances there are."""
        for pool in self._pools.values():
            if name in pool:
                return pool
        known = ", ".join(instance.name for instance in self) or "none"
        raise NotFound(f"no instance {name!r}; known: {known}")

    # ------------------------------------------------ changes

    def add(self, spec: InstanceSpec) -> Instance:
        """A new instance, or a new spec of a known one. Conflict if it would change its model."""
        for pool in self._pools.values():
            if spec.name in pool and (known := pool.get(spec.name).spec).model != spec.model:
                raise Conflict(
                    f"{spec.name} serves {known.model or 'no named model'} and was declared for "
                    f"{spec.model or 'none'}: remove it first"
                )
        if spec.model not in self._pools:
            self._pools[spec.model] = InstancePool(self._context)
        return self._pools[spec.model].add(spec)

    def get(self, name: str) -> Instance:
        """The instance of that name, or NotFound."""
        return self.home(name).get(name)

    def drain(self, name: str, *, then_remove: bool = False) -> Instance:
        """No new requests; what runs is finished."""
        return self.home(name).drain(name, then_remove=then_remove)

    def resume(self, name: str) -> Instance:
        """Undo a drain or an ejection."""
        return self.home(name).resume(name)

    def remove(self, name: str) -> None:
        """Forget it now."""
        self.home(name).remove(name)

    def switch_role(self, name: str, role: Role) -> Instance:
        """P becomes D or the reverse; only when nothing runs on it."""
        return self.home(name).switch_role(name, role)

    def set_up(self, instance: Instance, *, up: bool, error: str = "") -> None:
        """The verdict of the health checks."""
        if (pool := self._pools.get(instance.spec.model)) is not None:
            pool.set_up(instance, up=up, error=error)

    def note_compatibility(self, instance: Instance, compatibility: Compatibility) -> None:
        """Note what an instance reports of itself and its peers."""
        if (pool := self._pools.get(instance.spec.model)) is not None:
            pool.note_compatibility(instance, compatibility)

    def note_topology(self, instance: Instance, topology: PairTopology) -> None:
        """Note what an instance publishes."""
        if (pool := self._pools.get(instance.spec.model)) is not None:
            pool.note_topology(instance, topology)

    def finish_drains(self) -> None:
        """Remove instances, or change their roles, that waited for requests to end."""
        for pool in tuple(self._pools.values()):
            pool.finish_drains()

    def close(self) -> None:
        """Close all connections."""
        for pool in self._pools.values():
            pool.close()
