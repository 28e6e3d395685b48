"""What one proxy process is made of, when it stops, and the numbers that its live page shows."""

from __future__ import annotations

import asyncio
import logging
import time
from importlib.resources import files
from typing import Any

from mooncake_proxy import __version__
from mooncake_proxy.api.admission_queue import AdmissionQueue
from mooncake_proxy.api.tenants import Tenants
from mooncake_proxy.config import ProxyConfig
from mooncake_proxy.errors import Refusal
from mooncake_proxy.http1.upstream_connection import ClientContext
from mooncake_proxy.ops.proxy_metrics import SECONDS, ProxyMetrics
from mooncake_proxy.ops.worker_link import WorkerLink
from mooncake_proxy.pool.instances import Instance
from mooncake_proxy.pool.membership import ChangeOperation, MembershipChange, apply_change
from mooncake_proxy.pool.registrations import Registrations
from mooncake_proxy.routing.model_routers import ModelRouters

logger = logging.getLogger(__name__)


class ProxyProcess:
    """One proxy process without its listener. `share` where it is one of several workers."""

    def __init__(self, config: ProxyConfig, client: ClientContext, link: WorkerLink | None) -> None:
        self.config = config
        self.link = link
        self.routers = ModelRouters(config, client)
        self.pools = self.routers.pools
        # Of instances without a model name; has what the others share with it.
        self.router = self.routers.first
        self.admission = AdmissionQueue(config.admission)
        self.tenants = Tenants(config.tenants, client, self.router.metrics)
        self.is_draining = False
        self.registrations = Registrations(
            self.pools, client.loop.time, config.register_secret.encode()
        )
        if link is not None:
            self.registrations.forward = link.broadcast
            link.on_registration = self.registrations.follow

    def change(self, change: MembershipChange) -> Instance | None:
        """A change of the instance pool from the admin API; the other workers make it too."""
        instance = apply_change(self.pools, change)
        if self.link is not None:
            self.link.broadcast(change)
        return instance

    def change_roles(self) -> None:
        """Make the changes of roles that the conductors want, if this process is the one to."""
        if self.link is not None and not self.link.leads:
            return
        for router in self.routers:
            wanted = None if router.conductor is None else router.conductor.role_change()
            if wanted is None:
                continue
            instance, role = wanted
            try:
                self.change(MembershipChange(ChangeOperation.ROLE, instance.name, role))
            except Refusal as exc:
                logger.warning(
                    "%s does not become a %s instance: %s", instance.name, role.label, exc
                )
            else:
                self.router.metrics.role_changes.add(instance.name, role.label)

    @property
    def num_running(self) -> int:
        """Requests that all workers serve."""
        elsewhere = 0 if self.link is None else self.link.running_elsewhere()
        return self.admission.num_running + elsewhere

    @property
    def num_waiting(self) -> int:
        """Requests in the queues of all workers."""
        elsewhere = 0 if self.link is None else self.link.waiting_elsewhere()
        return self.admission.num_waiting + elsewhere

    def all_metrics(self) -> ProxyMetrics:
        """What all workers have counted."""
        if self.link is None:
            return self.router.metrics
        return ProxyMetrics.sum_of([self.router.metrics.snapshot(), *self.link.counts_of_others()])


# Signals so close together are one stop: terminals and service managers reach several processes,
# and the workers' parent passes on what it got.
SAME_STOP_S = 1.0


class ShutdownSignals:
    """What SIGINT and SIGTERM have asked for. The first one ends what runs in good order, a second
    one at once."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.is_hurried = False
        self._first_at = 0.0

    def signal(self, now: float) -> None:
        """One came at `now`, in seconds of the loop's clock."""
        if not self.asked.is_set():
            self.asked.set()
            self._first_at = now
        elif now - self._first_at > SAME_STOP_S:
            self.is_hurried = True


def live_page() -> bytes:
    """The page."""
    return files("mooncake_proxy.ops").joinpath("live_page.html").read_bytes()


def live_view(process: ProxyProcess, instances: list[dict[str, Any]]) -> dict[str, Any]:
    """What the page shows, counted over all workers."""
    metrics = process.all_metrics()
    first_token = metrics.first_token_seconds.series.get((), [0.0] * (len(SECONDS) + 2))
    return {
        "time": time.time(),
        "version": __version__,
        "flow": process.config.flow,
        "prefill_policy": process.config.prefill_policy,
        "decode_policy": process.config.decode_policy,
        "running": sum(i["running"] for i in instances if i["role"] != "prefill"),
        "waiting": process.num_waiting,
        "requests": sum(metrics.requests.values.values()),
        "errors": sum(n for (_, status), n in metrics.requests.values.items() if status >= "400"),
        "prompt_tokens": metrics.prompt_tokens.values[()],
        "cached_tokens": metrics.cached_tokens.values[()],
        "first_token": {"bounds": SECONDS, "counts": first_token[:-1]},
        "instances": instances,
    }
