"""The routers of all models that the proxy serves, one per model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from mooncake_proxy.config import ProxyConfig
from mooncake_proxy.errors import NotFound
from mooncake_proxy.http1.upstream_connection import ClientContext
from mooncake_proxy.pool.instances import Instance, InstancePool
from mooncake_proxy.pool.model_pools import ModelPools
from mooncake_proxy.routing.router import RequestRouter, SharedState

if TYPE_CHECKING:
    from mooncake_proxy.routing.reservation_sharing import ReservationSharing


class ModelRouters:
    """All routers, by pool; created on first use.

    `first` serves instances without a model name, and gives access to what all routers share.
    """

    def __init__(self, config: ProxyConfig, client: ClientContext, *, seed: int | None = None):
        self.pools = ModelPools(client)
        self._config, self._client = config, client
        self._shared = SharedState(config, seed)
        self.first = RequestRouter(config, client, self.pools.unnamed, self._shared)
        self._routers: dict[InstancePool, RequestRouter] = {self.pools.unnamed: self.first}
        self._listeners: list[Callable[[RequestRouter], None]] = []
        self._sharing: ReservationSharing | None = None

    def __iter__(self) -> Iterator[RequestRouter]:
        return iter(tuple(self._routers.values()))

    def on_router(self, listen: Callable[[RequestRouter], None]) -> None:
        """Call `listen` with every existing router now, and with new ones when they are added."""
        self._listeners.append(listen)
        for router in self:
            listen(router)

    def share_reservations(self) -> ReservationSharing | None:
        """Return what publishes the conductors' reservations; None without conductors."""
        if self._sharing is None and self.first.conductor is not None:
            from mooncake_proxy.routing.reservation_sharing import ReservationSharing  # needs numpy

            self._sharing = ReservationSharing(self, self.first.client.loop)
        return self._sharing

    def of_model(self, model: str | None) -> RequestRouter:
        """The router of a model. Raises the errors of `ModelPools.pool_of`."""
        pool = self.pools.pool_of(model)
        return self._routers.get(pool) or self._of(pool)

    @property
    def in_use(self) -> list[RequestRouter]:
        """Routers of the pools that have instances, or had some until lately; `first` if none."""
        return [self._of(pool) for pool in self.pools.in_use]

    def _of(self, pool: InstancePool) -> RequestRouter:
        router = self._routers.get(pool)
        if router is None:
            model = self.pools.model_of(pool)
            router = RequestRouter(self._config, self._client, pool, self._shared, model)
            self._routers[pool] = router
            for listen in self._listeners:
                listen(router)
        return router

    def note_verdict(self, instance: Instance) -> None:
        """Process a change of an instance's health."""
        self._of(self.pools.home(instance.name)).note_verdict(instance)

    def note_restart(self, instance: Instance) -> None:
        """Process a restart of an instance."""
        self._of(self.pools.home(instance.name)).note_restart(instance)

    def explain(self, request_id: str) -> dict[str, Any]:
        """The conductor's decision about a request, with every term.

        Raises:
            NotFound: no conductor has a record of the request (any more).
        """
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
        """Do periodic work of all routers; called a few times per second."""
        self.first.metrics.settle()
        self.pools.finish_drains()
        for router in self:
            if router.conductor is not None:
                router.conductor.sweep()

    @property
    def needs_metaserver(self) -> bool:
        """Whether any router wants the metaserver to be opened, see `needs_metaserver`."""
        return any(router.needs_metaserver for router in self)

    def poll(self) -> None:
        """Re-raise the exception of a failed conductor thread."""
        for router in self:
            if router.conductor is not None:
                router.conductor.poll()

    async def close(self) -> None:
        """Wait for running releases, then close all connections."""
        await self.first.close()
        for router in self:
            if router.conductor is not None:
                router.conductor.close()
        self.pools.close()
