"""The instance pools of all models, and the choice of the pool that serves a request."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

from mooncake_proxy.errors import BadRequest, Conflict, ModelNotFound, NotFound
from mooncake_proxy.http1.upstream_connection import ClientContext
from mooncake_proxy.pool.instance_reports import Compatibility
from mooncake_proxy.pool.instances import Instance, InstancePool, InstanceSpec, Role
from mooncake_proxy.pool.pair_topology import PairTopology

logger = logging.getLogger(__name__)
# For so long a model without instances is one that can't be served now, which clients try again:
# its only instance may be restarting. Then it is one that does not exist.
KEPT_S = 3600.0


class ModelPools:
    """All instances, by model. Watchers, health checks and the admin API use it as a single pool.

    An instance belongs to the pool of the first model name that it was declared with; without one,
    to `unnamed`, which serves every request whose model no other pool has.
    """

    def __init__(self, context: ClientContext) -> None:
        self._context = context
        self.unnamed = InstancePool(context)
        # Called with the name of an instance that its source declares from now on.
        self.on_declared: Callable[[str], object] = lambda name: None
        self._pools: dict[str, InstancePool] = {"": self.unnamed}
        # Instances that operators have removed although their sources still declare them, by name:
        # they stay out until the source withdraws or changes them, or an operator wants them back.
        self.removed: dict[str, InstanceSpec] = {}
        # The names of each pool when it last had instances, and until when they count without one.
        self._last_names: dict[InstancePool, tuple[frozenset[str], float]] = {}

    def __iter__(self) -> Iterator[Instance]:
        return (instance for pool in tuple(self._pools.values()) for instance in pool)

    def __contains__(self, instance: Instance) -> bool:
        """Whether this instance is in its pool; after a removal, another one may have its name."""
        pool, name = self._pools.get(instance.spec.model), instance.name
        return pool is not None and name in pool and pool.get(name) is instance

    def __len__(self) -> int:
        return sum(len(pool) for pool in self._pools.values())

    @property
    def in_use(self) -> list[InstancePool]:
        """Pools that have instances, or had some until lately; the unnamed one if none has any."""
        pools = [pool for pool in self._pools.values() if len(pool) or self.names_of(pool)]
        return pools or [self.unnamed]

    @property
    def names(self) -> list[str]:
        """All model names that requests may use, in the order of their pools."""
        return [name for pool in self._pools.values() for name in sorted(self.names_of(pool))]

    def names_of(self, pool: InstancePool) -> frozenset[str]:
        """The names of a pool's model in requests. They stay for a while after the last instance
        has left."""
        if len(pool):
            return pool.model_names
        names, ends_at = self._last_names.get(pool, (frozenset[str](), 0.0))
        return names if self._context.loop.time() < ends_at else frozenset()

    def model_of(self, pool: InstancePool) -> str:
        """The first name of a pool's model; empty for the one of instances without a name."""
        return next(model for model, known in self._pools.items() if known is pool)

    def pool_of(self, model: str | None) -> InstancePool:
        """The pool that serves requests for `model`.

        Raises:
            ModelNotFound: no pool serves it.
            BadRequest: there are several pools and the request names no model.
        """
        if len(self._pools) == 1:
            return self.unnamed
        if model is not None:
            for pool in self._pools.values():
                if model in pool.model_names:
                    return pool
            for pool in self._pools.values():
                if model in self.names_of(pool):
                    return pool
        if len(self.unnamed):
            return self.unnamed
        if model is not None:
            raise ModelNotFound(model)
        if len(used := self.in_use) == 1:
            return used[0]
        known = ", ".join(self.names)
        raise BadRequest(f"you must provide a model parameter: one of {known}", param="model")

    def home(self, name: str) -> InstancePool:
        """The pool of the instance `name`. Raises NotFound, which lists the known instances."""
        for pool in self._pools.values():
            if name in pool:
                return pool
        known = ", ".join(instance.name for instance in self) or "none"
        raise NotFound(f"no instance {name!r}; known: {known}")

    # ------------------------------------------------ changes

    def add(self, spec: InstanceSpec) -> Instance:
        """Add an instance, or apply a new spec. Raises Conflict if that would change its model."""
        for pool in self._pools.values():
            if spec.name in pool and (known := pool.get(spec.name).spec).model != spec.model:
                raise Conflict(
                    f"{spec.name} serves {known.model or 'no named model'} and was declared for "
                    f"{spec.model or 'none'}: remove it first"
                )
        if spec.model not in self._pools:
            self._pools[spec.model] = InstancePool(self._context)
        self.removed.pop(spec.name, None)
        instance = self._pools[spec.model].add(spec)
        self._note_names()
        return instance

    def _note_names(self) -> None:
        ends_at = self._context.loop.time() + KEPT_S
        for pool in self._pools.values():
            if pool.model_names:
                self._last_names[pool] = pool.model_names, ends_at

    def get(self, name: str) -> Instance:
        """The instance with this name. Raises NotFound."""
        return self.home(name).get(name)

    def drain(self, name: str, *, then_remove: bool = False) -> Instance:
        """Send no new requests to an instance; running ones finish."""
        return self.home(name).drain(name, then_remove=then_remove)

    def resume(self, name: str) -> Instance:
        """Undo a drain or an ejection, or the removal by an operator of what is still declared."""
        removed = self.removed.pop(name, None)
        if removed is not None and all(instance.name != name for instance in self):
            return self.add(removed)
        return self.home(name).resume(name)

    def keep_out(self, name: str) -> None:
        """Don't add an instance again that an operator removes, if its source declares it over and
        over. Raises NotFound."""
        declared = self.get(name).declared
        if declared.source not in ("flags", "api"):
            self.removed[name] = declared
            logger.info(
                "instance %s stays out until %s withdraws it, or it is added or resumed",
                *(name, declared.source),
            )

    def remove(self, name: str) -> None:
        """Remove an instance immediately."""
        self.home(name).remove(name)

    def switch_role(self, name: str, role: Role) -> Instance:
        """Switch an idle instance to another role. Raises Conflict if it is busy."""
        return self.home(name).switch_role(name, role)

    def set_up(self, instance: Instance, *, up: bool, error: str = "") -> None:
        """Apply the verdict of a health check."""
        if (pool := self._pools.get(instance.spec.model)) is not None:
            pool.set_up(instance, up=up, error=error)

    def note_compatibility(self, instance: Instance, compatibility: Compatibility) -> None:
        """Update what an instance reports about itself and its peers."""
        if (pool := self._pools.get(instance.spec.model)) is not None:
            pool.note_compatibility(instance, compatibility)

    def note_topology(self, instance: Instance, topology: PairTopology | None) -> None:
        """Update an instance's topology; None: it is not known."""
        if (pool := self._pools.get(instance.spec.model)) is not None:
            pool.note_topology(instance, topology)

    def finish_drains(self) -> None:
        """Remove drained instances that are idle, or switch their roles."""
        self._note_names()
        for pool in tuple(self._pools.values()):
            pool.finish_drains()

    def close(self) -> None:
        """Close all connections."""
        for pool in self._pools.values():
            pool.close()
