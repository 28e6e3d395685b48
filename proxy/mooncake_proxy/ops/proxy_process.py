"""The state of one proxy process, its shutdown signals, and the data of the live page."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mooncake_proxy import __version__
from mooncake_proxy.api.admission_queue import AdmissionQueue
from mooncake_proxy.api.tenants import Tenants
from mooncake_proxy.config import ProxyConfig
from mooncake_proxy.errors import Refusal
from mooncake_proxy.http1.tls_contexts import ServerCertificate
from mooncake_proxy.http1.upstream_connection import ClientContext
from mooncake_proxy.ops.live_history import SAMPLE_S, LiveHistory, Pair, Totals
from mooncake_proxy.ops.proxy_metrics import ProxyMetrics
from mooncake_proxy.ops.reloaded_files import (
    LOOK_S,
    ReloadedFiles,
    stamps_of,
    with_current_keys,
)
from mooncake_proxy.ops.worker_link import WorkerLink
from mooncake_proxy.pool.instances import Instance, Role
from mooncake_proxy.pool.membership import ChangeOperation, MembershipChange, apply_change
from mooncake_proxy.pool.registrations import Registrations
from mooncake_proxy.routing.model_routers import ModelRouters

logger = logging.getLogger(__name__)
# Shown for a sender of KV that has left the pool or was restarted.
GONE = "(gone)"
MAX_REFUSALS = 20


class ProxyProcess:
    """Everything in one proxy process except its listeners.

    Args:
        config: the checked configuration.
        client: shared state of the connections to instances.
        link: connects this process with the proxy's other workers; None: a single process.
    """

    def __init__(self, config: ProxyConfig, client: ClientContext, link: WorkerLink | None) -> None:
        self.config = config
        self.link = link
        self.routers = ModelRouters(config, client)
        self.pools = self.routers.pools
        # Router of instances without a model name; owns what all routers share.
        self.router = self.routers.first
        self.admission = AdmissionQueue(config.admission)
        self.tenants = Tenants(config.tenants, client, self.router.metrics)
        # None: clients connect without TLS.
        self.certificate: ServerCertificate | None = None
        self._reloaded: list[ReloadedFiles] = []
        self._read_files(config)
        self.is_draining = False
        self.history = LiveHistory()
        self.registrations = Registrations(
            self.pools, client.loop.time, config.register_secret.encode()
        )
        if link is not None:
            self.registrations.forward = link.broadcast
            link.on_registration = self.registrations.apply

    def _read_files(self, config: ProxyConfig) -> None:
        keys, tls = config.key_files, config.tls
        paths = (keys.api, keys.admin)
        self._reloaded.append(ReloadedFiles("keys", paths, self._reload_keys, keys.stamps))
        if tls.certificate is not None:
            paths = (tls.certificate, tls.key)
            stamps = stamps_of(*paths)  # before they are read
            self.certificate = certificate = ServerCertificate(tls)
            read = certificate.reload
            self._reloaded.append(ReloadedFiles("TLS certificate", paths, read, stamps))

    async def watch_files(self) -> None:
        """Read changed files of keys and certificates, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            for files in self._reloaded:
                files.look()

    def reload(self) -> None:
        """Read the files of keys and certificates again."""
        for files in self._reloaded:
            files.reload()

    def _reload_keys(self) -> None:
        self.config = with_current_keys(self.config)
        self.tenants.set_keys(self.config.tenants)
        self.admission.set_weights(self.config.tenants)

    def change(self, change: MembershipChange) -> Instance | None:
        """Apply a change of the pool, and publish it to the other workers."""
        instance = apply_change(self.pools, change)
        if self.link is not None:
            self.link.broadcast(change)
        return instance

    def change_roles(self) -> None:
        """Make the role switches that the conductors want. Only the leading worker does so."""
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
                logger.warning("can't switch %s to the role %s: %s", instance.name, role.label, exc)
            else:
                self.router.metrics.role_changes.add(instance.name, role.label)

    @property
    def num_running(self) -> int:
        """Requests being served by all workers."""
        elsewhere = 0 if self.link is None else self.link.running_elsewhere()
        return self.admission.num_running + elsewhere

    @property
    def num_waiting(self) -> int:
        """Requests in the queues of all workers."""
        elsewhere = 0 if self.link is None else self.link.waiting_elsewhere()
        return self.admission.num_waiting + elsewhere

    def all_metrics(self) -> ProxyMetrics:
        """The metrics of all workers, summed up."""
        if self.link is None:
            return self.router.metrics
        return ProxyMetrics.sum_of([self.router.metrics.snapshot(), *self.link.counts_of_others()])

    async def keep_history(self) -> None:
        """Take a sample of the counters every SAMPLE_S, until cancelled."""
        while True:
            self.take_sample()
            await asyncio.sleep(SAMPLE_S)

    def take_sample(self) -> None:
        """Add a sample of all workers' counters to the history."""
        metrics = self.router.metrics
        if self.link is not None:
            names = (own := metrics.charted()).keys()
            theirs = self.link.counts_of_others()
            parts = [{name: rows[name] for name in names if name in rows} for rows in theirs]
            metrics = ProxyMetrics.sum_of([own, *parts])
        running = sum(i.total_running for i in self.pools if i.spec.role is not Role.PREFILL)
        load = (running, self.num_waiting)
        self.history.add(Totals.of(metrics, time.time(), load, kv_by_pair(self.pools)))


# Signals within this time count as one: terminals and service managers signal several processes,
# and the workers' parent forwards what it gets.
SIGNAL_WINDOW_S = 1.0


class ShutdownSignals:
    """Shutdown requested by SIGINT and SIGTERM: the first one drains, a second one ends that."""

    def __init__(self) -> None:
        self.requested = asyncio.Event()
        self.is_forced = False
        self._first_at = 0.0

    def signal(self, now: float) -> None:
        """Process a signal received at loop time `now`, in seconds."""
        if not self.requested.is_set():
            self.requested.set()
            self._first_at = now
        elif now - self._first_at > SIGNAL_WINDOW_S:
            self.is_forced = True


def live_page() -> bytes:
    """The HTML of the live page."""
    return Path(__file__).with_name("live_page.html").read_bytes()


def kv_by_pair(instances: Iterable[Instance]) -> dict[Pair, int]:
    """Bytes of KV that instances have received, by (sender, receiver)."""
    receivers = list(instances)
    names = {i.compatibility.engine_id: i.name for i in receivers if i.compatibility.engine_id}
    moved: dict[Pair, int] = {}
    for receiver in receivers:
        for engine_id, nbytes in receiver.bytes_received.items():
            # The engine id of a data-parallel rank is that of its instance plus `-dpN`.
            of_rank = names.get(engine_id.rpartition("-dp")[0], GONE)
            pair = (names.get(engine_id, of_rank), receiver.name)
            moved[pair] = moved.get(pair, 0) + nbytes
    return moved


def live_view(
    process: ProxyProcess, instances: list[dict[str, Any]], since: float
) -> dict[str, Any]:
    """The live page's data, of all workers, with the history samples later than `since`."""
    metrics, config = process.all_metrics(), process.config
    return {
        "time": time.time(),
        "version": __version__,
        "flow": config.flow,
        "prefill_policy": config.prefill_policy,
        "decode_policy": config.decode_policy,
        "objectives": {"ttft": config.slo_ttft_s, "tbt": config.slo_tbt_s},
        "running": sum(i["running"] for i in instances if i["role"] != "prefill"),
        "waiting": process.num_waiting,
        "requests": sum(metrics.requests.values.values()),
        "errors": sum(n for (_, status), n in metrics.requests.values.items() if status >= "400"),
        "prompt_tokens": metrics.prompt_tokens.values[()],
        "cached_tokens": metrics.cached_tokens.values[()],
        "refusals": refusals(metrics),
        "history": process.history.columns(since),
        "pairs": process.history.pairs(),
        "instances": instances,
    }


def refusals(metrics: ProxyMetrics) -> list[dict[str, Any]]:
    """Errors, failed attempts and fallbacks with their counts, the most frequent first."""
    counts = Counter[str]()
    for (endpoint, status), count in metrics.requests.values.items():
        if status >= "400":
            counts[f"{status} at {endpoint}"] += int(count)
    for (key, limit), count in metrics.rate_limited.values.items():
        counts[f"API key {key} over its limit of {limit}"] += int(count)
    for (name, role, outcome), count in metrics.attempts.values.items():
        if outcome != "ok":
            counts[f"{outcome}: {role} at {name}"] += int(count)
    for (reason,), count in metrics.fallbacks.values.items():
        counts[f"prompt computed by the decode instance: {reason}"] += int(count)
    return [{"what": what, "count": count} for what, count in counts.most_common(MAX_REFUSALS)]
