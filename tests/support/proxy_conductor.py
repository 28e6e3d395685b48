"""A proxy whose requests the conductor places, for tests over fake instances."""

from __future__ import annotations

from typing import Any

from support.proxy_fakes import FakeDeployment

from mooncake_proxy.config import ConductorConfig
from mooncake_proxy.routing.conductor_routing import ConductorRouting


def settings(policy: str = "cost", flow: str = "pull", **conductor: Any) -> dict[str, Any]:
    """Settings of a proxy whose requests the conductor places."""
    chosen = ConductorConfig(policy=policy, binds_late=flow == "pull", **conductor)
    return {
        "prefill_policy": policy,
        "decode_policy": policy,
        "flow": flow,
        "conductor": chosen,
    }


def conductor_of(s: FakeDeployment) -> ConductorRouting:
    assert s.app.router.conductor is not None
    return s.app.router.conductor


def check_nothing_is_reserved(s: FakeDeployment) -> None:
    """Check that no prefill time and no decode slot is still reserved."""
    for fleet in (conductor_of(s).pairs.conductor, conductor_of(s).coupled.conductor):
        assert len(fleet.book) == 0
        assert len(fleet.ledger) == 0
        assert not fleet.fleet.queues.num_requests.any()
