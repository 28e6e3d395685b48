"""The sweep: enforces timeouts towards clients and instances, and does other periodic work.

One loop that runs a few times per second is cheaper than a timer per request.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from mooncake_proxy.http1.connection_pool import postpone_timeouts, sweep_timeouts
from mooncake_proxy.http1.server_connection import ServerProtocol
from mooncake_proxy.ops.access_log import AccessLog
from mooncake_proxy.ops.proxy_process import ProxyProcess

logger = logging.getLogger(__name__)
SWEEP_INTERVAL_S = 0.25
FORGET_INTERVAL_S = 60.0
# A turn that begins later than this was held up: the process was stopped (`docker pause`, SIGSTOP,
# swapping), or something blocked the loop.
MAX_LATE_S = 1.0


class Sweep:
    """The periodic work of one proxy process.

    Args:
        process: the pools, routers and registrations.
        connections: those of clients, of all listeners.
        access: the access log.
        open_metaserver: opens the metaserver for early pulls; returns False if it can't.
    """

    def __init__(
        self,
        process: ProxyProcess,
        connections: set[ServerProtocol],
        access: AccessLog,
        open_metaserver: Callable[[], Awaitable[bool]],
    ) -> None:
        self._process = process
        self._client = process.router.client
        self._connections = connections
        self._access = access
        self._open_metaserver = open_metaserver
        self._latest = process.router.now()
        self._forget_at = 0.0

    async def run(self) -> None:
        """Sweep until cancelled."""
        routers, now, can_open = self._process.routers, self._process.router.now, True
        while True:
            await asyncio.sleep(SWEEP_INTERVAL_S)
            self.enforce_timeouts(now())
            routers.sweep()
            if can_open and routers.needs_metaserver:
                can_open = await self._open_metaserver()
            self._process.change_roles()
            self._forget_removed(now())
            self._access.flush()

    def enforce_timeouts(self, now: float) -> None:
        """End what has timed out at loop time `now`.

        Time in which this process could not read does not count. A late turn only moves the
        timeouts: it may come before the loop has read what has arrived in the meantime.
        """
        stopped_s = now - self._latest - SWEEP_INTERVAL_S
        self._latest = now
        if stopped_s > MAX_LATE_S:
            logger.warning("this process was stopped or blocked for %.1f s", stopped_s)
            postpone_timeouts(self._client, stopped_s)
            for connection in self._connections:
                connection.postpone_timeouts(stopped_s)
            self._process.registrations.postpone_expiry(stopped_s)
            return
        sweep_timeouts(self._client)
        for connection in tuple(self._connections):
            connection.sweep(now)
        self._process.registrations.expire()

    def _forget_removed(self, now: float) -> None:
        """Drop the metrics of instances that have left the pool a while ago."""
        if now >= self._forget_at:
            self._forget_at = now + FORGET_INTERVAL_S
            names = {instance.name for instance in self._process.pools}
            self._process.router.metrics.forget_instances(names, now)
