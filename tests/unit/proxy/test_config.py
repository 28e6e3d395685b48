"""Errors in the configuration are named."""

from __future__ import annotations

import pytest

from mooncake_proxy.config import ProxyConfig
from mooncake_proxy.errors import (
    ConfigError,
)
from mooncake_proxy.http1.http_wire import Origin
from mooncake_proxy.pool.instances import InstanceSpec, Role


def spec(port: int, source: str, role: Role = Role.DECODE) -> InstanceSpec:
    return InstanceSpec(Origin("http", "h", port), role, source=source)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"flow": "pull-push"}, "--flow 'pull-push': wanted one of pull, push"),
        ({"prefill_policy": "best"}, "--prefill-policy 'best'"),
        ({"port": 70000}, "--port 70000"),
        ({"workers": 0}, "--workers 0"),
        ({"admin_port": 70000}, "--admin-port 70000"),
        ({"admin_port": 0, "workers": 2}, "--admin-port 0: with several workers"),
        ({"cache_salt_per_key": True}, "--cache-salt-per-key: wanted --api-key-file"),
        ({"otlp_endpoint": "nonsense"}, "--otlp-endpoint 'nonsense': wanted the URL"),
        ({"otlp_endpoint": "collector:4318"}, "such as http://collector:4318"),
        ({"otlp_endpoint": "http://collector:port"}, "--otlp-endpoint"),
        ({"flow": "push", "host": "::"}, "--advertise-url"),
        ({"instances": (spec(1, "a"), spec(1, "b", Role.PREFILL))}, "http://h:1 given twice"),
    ],
)
def test_bad_configurations_are_named(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ProxyConfig(**settings)  # type: ignore[arg-type]  # wrong on purpose
