"""Deployment rules: every problem names what was wanted, what was found, and what to do."""

from __future__ import annotations

import os
import socket
from dataclasses import replace

import pytest

from mooncake_hal.backend import Capabilities
from mooncake_hal.deployment import (
    BlockSize,
    DeploymentPlan,
    Hardware,
    InstanceInfo,
    InstancePlan,
    check_compatibility,
    default_block_size,
    usable_transports,
)
from mooncake_hal.errors import DeploymentRefused
from mooncake_hal.port_range import PortRange, ReservedPorts
from mooncake_hal.ports import Port, find_port_owner, find_ports_in_use
from mooncake_hal.specs import TransportConstraints

ANY = TransportConstraints()
LINKS = TransportConstraints(same_backend=True, same_generation=True, any_tp_ratio=False)
FREE = InstanceInfo(Hardware("cpu", "x86_64"), 1, 16, transports={"tcp": ANY})
STRICT = InstanceInfo(Hardware("vendor", "A2"), 4, 128, transports={"links": LINKS})
PREFILL = InstancePlan("p0", "prefill", "MooncakeConnector", (Port("HTTP", "127.0.0.1", 0),), FREE)
DECODE = replace(PREFILL, name="d0", role="decode")


@pytest.mark.parametrize(
    ("offered", "expected"),
    [
        ((64,), BlockSize(64, "the only one that the backend supports")),
        ((128, 16, 8), BlockSize(16, "the default")),
        ((64, 32), BlockSize(64, "the backend's best; it does not support the default of 16")),
    ],
)
def test_default_block_size_suits_the_backend(
    offered: tuple[int, ...], expected: BlockSize
) -> None:
    capabilities = Capabilities(("float32",), offered, ("BHLPT",), False, ("tcp",))
    assert default_block_size(capabilities) == expected


def test_valid_deployment_has_no_problems() -> None:
    assert DeploymentPlan((PREFILL, DECODE)).problems() == []


@pytest.mark.parametrize(
    ("instances", "message"),
    [
        ((PREFILL,), "1 prefill instances and no decode instance; add at least one"),
        ((DECODE,), "1 decode instances and no prefill instance; add at least one"),
        (
            (replace(PREFILL, role="both"), replace(PREFILL, role="cook")),
            "role 'cook' is not known",
        ),
        ((replace(PREFILL, connector=""), DECODE), "p0: role 'prefill' needs a KV connector"),
        (
            (replace(PREFILL, connector="NoConnector"), DECODE),
            "p0: KV connector 'NoConnector' is not known; known are MooncakeConnector",
        ),
        (
            (
                replace(PREFILL, ports=(Port("HTTP", "127.0.0.1", 8100),)),
                replace(DECODE, ports=(Port("side channel", "127.0.0.1", 8100),)),
            ),
            "port 8100 on 127.0.0.1 is planned for p0 (HTTP) and d0 (side channel)",
        ),
        (
            (replace(PREFILL, info=replace(STRICT, tp_size=2)), replace(DECODE, info=STRICT)),
            "p0 and d0: links: it needs a tensor-parallel size of prefill that is a multiple of "
            "decode's, but they are 2 and 4",
        ),
        (
            (replace(PREFILL, info=replace(STRICT, pp_size=0)), DECODE),
            "p0: tensor-parallel size 4, 0 pipeline stages, KV blocks of 128 tokens: each must be",
        ),
        (
            (PREFILL, replace(DECODE, info=replace(STRICT, tp_size=0))),
            "d0: tensor-parallel size 0",
        ),
    ],
)
def test_invalid_deployment_has_problems(instances: tuple[InstancePlan, ...], message: str) -> None:
    problems = DeploymentPlan(instances).problems()
    assert any(message in problem for problem in problems), problems


@pytest.mark.parametrize(
    ("prefill", "decode", "message"),
    [
        (STRICT, replace(STRICT, tp_size=3), "links: it needs .* they are 4 and 3"),
        (
            STRICT,
            replace(STRICT, hardware=replace(STRICT.hardware, generation="A3")),
            "links: it needs the same device generation on both sides, but prefill has 'A2' and "
            "decode 'A3'",
        ),
        (
            STRICT,
            replace(STRICT, hardware=FREE.hardware),
            "links: it needs the same backend on both sides, but prefill runs 'vendor' and decode "
            "'cpu'",
        ),
        (
            replace(FREE, transports={"tcp": replace(ANY, variants=("4", "4 tls"))}),
            replace(FREE, transports={"tcp": replace(ANY, variants=("5",))}),
            "tcp: prefill speaks 4 or 4 tls, but decode 5: run one release with the same settings",
        ),
        (
            STRICT,
            FREE,
            "links: the decode instance does not offer it; it offers tcp; tcp: the prefill",
        ),
    ],
)
def test_incompatible_pair_is_rejected(
    prefill: InstanceInfo, decode: InstanceInfo, message: str
) -> None:
    with pytest.raises(DeploymentRefused, match=message):
        check_compatibility(prefill, decode)


@pytest.mark.parametrize("tp_sizes", [(4, 4), (4, 2), (4, 1)])
def test_default_ratio_rule_allows_multiples(tp_sizes: tuple[int, int]) -> None:
    check_compatibility(replace(STRICT, tp_size=tp_sizes[0]), replace(STRICT, tp_size=tp_sizes[1]))


def test_pipeline_stages_need_no_ratio() -> None:
    check_compatibility(replace(STRICT, pp_size=3), replace(STRICT, pp_size=2))


def test_transport_without_ratio_rule_allows_any_ratio() -> None:
    check_compatibility(replace(FREE, tp_size=2), replace(FREE, tp_size=3))


@pytest.mark.parametrize("variants", [(), ("4",), ("5", "4")])
def test_one_common_variant_of_a_transport_is_enough(variants: tuple[str, ...]) -> None:
    prefill, decode = (
        replace(FREE, transports={"tcp": replace(ANY, variants=spoken)})
        for spoken in (("4", "3"), variants)
    )
    assert usable_transports(prefill, decode) == ("tcp",)


def test_pair_uses_the_transports_that_allow_it() -> None:
    both = {"links": LINKS, "staged": ANY}
    prefill, decode = replace(STRICT, transports=both), replace(FREE, transports=both)
    assert usable_transports(prefill, decode) == ("staged",)
    assert usable_transports(prefill, prefill) == ("links", "staged")
    check_compatibility(prefill, decode)
    check_compatibility(replace(decode, tp_size=3), replace(prefill, tp_size=2))


def test_port_in_use_names_its_process() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        number = listener.getsockname()[1]
        plan = replace(PREFILL, ports=(Port("HTTP", "127.0.0.1", number),))
        with pytest.raises(DeploymentRefused, match=rf"port {number} .* is taken by .*pid"):
            DeploymentPlan((plan, DECODE)).validate()
        assert f"(pid {os.getpid()})" in str(find_port_owner(number))


def test_port_in_a_reserved_range_is_a_problem() -> None:
    engine = ReservedPorts("an engine", PortRange(20_000, 21_000), "ITS_PORT")
    ports = (Port("HTTP", "127.0.0.1", 20_500), Port("KV side channel", "127.0.0.1", 0))
    plan = replace(PREFILL, ports=ports, reserved=(engine,))
    assert DeploymentPlan((plan, DECODE)).problems() == [
        "p0: port 20500, wanted for HTTP, lies in 20000-21000, from which an engine may take any "
        "port at any time; choose one outside, or move that range (ITS_PORT)"
    ]


def test_port_wanted_twice_is_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        number = listener.getsockname()[1]
    twice = [Port("HTTP", "127.0.0.1", number), Port("side channel", "127.0.0.1", number)]
    assert len(find_ports_in_use(twice)) == 1


def test_ports_of_other_hosts_are_not_checked() -> None:
    assert find_ports_in_use([Port("HTTP", "192.0.2.1", 8100)]) == []
