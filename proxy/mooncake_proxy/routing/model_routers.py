"""A router for each model that the proxy serves; what is not of a model they share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from mooncake_proxy.config import ProxyConfig
from mooncake_proxy.errors import NotFound
from mooncake_proxy.http1.upstream_connection import ClientContext
from mooncake_proxy.pool.instances import Instance, InstancePool
from mooncake_proxy.pool.model_pools import ModelPools
from mooncake_proxy.routing.router import RequestRouter

if TYPE_CHECKING:
    from mooncake_proxy.routing.reservation_sharing import ReservationSharing


class ModelRouters:
    """Routers by pool. `first` is that of instances without a model name, and has what all share:
    counters, retry budget, suspects, metaserver, spans, background tasks."""

    def __init__(self, config: ProxyConfig, client: ClientContext, *, seed: int | None = None):
        self.pools = ModelPools(client)
        self.first = RequestRouter(config, client, self.pools.unnamed, seed=seed)
        self._routers: dict[InstancePool, RequestRouter] = {self.pools.unnamed: self.first}
        self._listeners: list[Callable[[RequestRouter], None]] = []
        self._sharing: ReservationSharing | None = None

    def __iter__(self) -> Iterator[RequestRouter]:
        return iter(tuple(self._routers.values()))

    def on_router(self, listen: Callable[[RequestRouter], None]) -> None:
        """Call with every router, now and when one is added."""
        self._listeners.append(listen)
        for router in self:
            listen(router)

    def share_reservations(self) -> ReservationSharing | None:
        """What the conductors reserve, for whoever tells it to other processes; None without
        conductors."""
        if self._sharing is None and self.first.conductor is not None:
            from mooncake_proxy.routing.reservation_sharing import ReservationSharing  # needs numpy

            self._sharing = ReservationSharing(self, self.first.client.loop)
        return self._sharing

    def of_model(self, model: str | None) -> RequestRouter:
        """Who routes requests for a model of that name: ModelNotFound, BadRequest as ModelPools."""
        pool = self.pools.pool_of(model)
        return self._routers.get(pool) or self._of(pool)

    @property
    def in_use(self) -> list[RequestRouter]:
        """Of pools with instances; the first one where none has any."""
        return [self._of(pool) for pool in self.pools.in_use]

    def _of(self, pool: InstancePool) -> RequestRouter:
        router = self._routers.get(pool)
        if router is None:
            [model, *_] = [instance.spec.model for instance in pool]
            router = self._routers[pool] = self.first.for_model(model, pool)
            for listen in self._listeners:
                listen(router)
        return router

    def note_verdict(self, instance: Instance) -> None:
        """An instance is up or down."""
        self._of(self.pools.home(instance.name)).note_verdict(instance)

    def explain(self, request_id: str) -> dict[str, Any]:
        """The decision about a request, with every term. NotFound where there is none any more."""
        if self.first.conductor is None:
            raise NotFound("the conductor places no requests here: start with --policy cost")
        found: NotFound | None = None
        for router in self:
            assert router.conductor is not None
            try:
                return router.conductor.explain(request_id)
            except NotFound as error:
                found = error
        assert found is not None
        raise found

    def sweep(self) -> None:
        """A few times a second."""
        self.first.metrics.settle()
        self.pools.finish_drains()
        for router in self:
            if router.conductor is not None:
                router.conductor.sweep()

    @property
    def want_metaserver(self) -> bool:
        """Whether early pulls of any model wait for nothing but an address that D can post to."""
        return any(router.wants_metaserver for router in self)

    def poll(self) -> None:
        """Raise what ended a thread of the conductors."""
        for router in self:
            if router.conductor is not None:
                router.conductor.poll()

    async def close(self) -> None:
        """Let running releases end, then close all connections."""
        await self.first.close()
        for router in self:
            if router.conductor is not None:
                router.conductor.close()
        self.pools.close()
