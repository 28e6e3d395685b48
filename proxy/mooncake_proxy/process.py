"""What one proxy process is made of, for everything that acts on it or shows it."""

from __future__ import annotations

from mooncake_proxy.admission import Admission
from mooncake_proxy.config import ProxyConfig
from mooncake_proxy.http1.connection import ClientContext
from mooncake_proxy.instances import Instance
from mooncake_proxy.membership import Change, apply
from mooncake_proxy.metrics import Metrics
from mooncake_proxy.router import Router
from mooncake_proxy.share import Share


class Process:
    """One proxy process without its listener. `share` where it is one of several workers."""

    def __init__(self, config: ProxyConfig, client: ClientContext, share: Share | None) -> None:
        self.config = config
        self.share = share
        self.router = Router(config, client)
        self.admission = Admission(config.admission)
        self.is_draining = False

    def change(self, change: Change) -> Instance | None:
        """A change of the fleet from the admin API; the other workers make it too."""
        instance = apply(self.router.fleet, change)
        if self.share is not None:
            self.share.tell(change)
        return instance

    @property
    def num_running(self) -> int:
        """Requests that all workers serve."""
        elsewhere = 0 if self.share is None else self.share.running_elsewhere()
        return self.admission.num_running + elsewhere

    @property
    def num_waiting(self) -> int:
        """Requests in the queues of all workers."""
        elsewhere = 0 if self.share is None else self.share.waiting_elsewhere()
        return self.admission.num_waiting + elsewhere

    def all_metrics(self) -> Metrics:
        """What all workers have counted."""
        if self.share is None:
            return self.router.metrics
        return Metrics.sum_of([self.router.metrics.snapshot(), *self.share.counts_of_others()])
