"""Instances wanted by a source, compared with those in the pool."""

from __future__ import annotations

from mooncake_proxy.http1.http_wire import Origin
from mooncake_proxy.pool.instances import InstanceSpec, Role
from mooncake_proxy.pool.membership import plan_membership


def spec(port: int, source: str, role: Role = Role.DECODE) -> InstanceSpec:
    return InstanceSpec(Origin("http", "h", port), role, source=source)


def test_source_changes_only_its_own_instances() -> None:
    present = [spec(1, "flags"), spec(2, "file"), spec(3, "file")]
    todo = plan_membership([spec(3, "file"), spec(4, "file")], present, "file")
    assert todo.add == (spec(4, "file"),)
    assert todo.leave == ("http://h:2",)
