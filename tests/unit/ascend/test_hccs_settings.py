"""What hccs derives from HCCL's settings: deadlines, port ranges, and errors."""

from __future__ import annotations

import pytest

from mooncake_hal.errors import HalError
from mooncake_hal.port_range import PortRange, ReservedPorts, reservation_conflict
from mooncake_hal_ascend.hccs.hccs_settings import (
    EngineDeadlines,
    HccsSettings,
    deadlines,
    engine_ports,
    settings_of_endpoint as settings_of,
)


def test_options_override_the_variable() -> None:
    assert settings_of({}, "") == HccsSettings("auto", "auto")
    assert settings_of({"protocol": "hccs"}, "protocol=roce engine=memfabric") == HccsSettings(
        "memfabric", "hccs"
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("protocol=ib", r"protocol must be one of \('auto', 'hccs', 'roce'\), not 'ib'"),
        ("engine=nixl", "engine must be one of"),
        ("ports=1", r"hccs has no settings \['ports'\]; it has \('engine', 'protocol'\)"),
        ("roce", "MOONCAKE_HAL_HCCS='roce'"),
    ],
)
def test_invalid_variable_is_rejected_by_name(text: str, words: str) -> None:
    with pytest.raises(HalError, match=words):
        settings_of({}, text)


def test_invalid_option_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="protocol must be one of"):
        settings_of({"protocol": "ib"}, "")


def test_roce_deadline_covers_all_retransmissions() -> None:
    found = deadlines({}, "auto")
    assert found == EngineDeadlines(
        10_000,
        33_064,  # as vllm-ascend's connector derives it
        "connect: 10000 ms, as HCCL_CONNECT_TIMEOUT is not set; transfer: 4.096 us * 2^20 "
        "(HCCL_RDMA_TIMEOUT) * 7 (HCCL_RDMA_RETRY_CNT) + 3000 ms",
    )
    shorter = deadlines({"HCCL_RDMA_TIMEOUT": "14", "HCCL_RDMA_RETRY_CNT": "3"}, "roce")
    assert shorter.transfer_ms == 3201


def test_hccs_deadline_has_no_retransmissions() -> None:
    assert deadlines({"HCCL_RDMA_TIMEOUT": "20"}, "hccs").transfer_ms == 3000


def test_variables_of_the_engine_take_precedence() -> None:
    vendor = {
        "HCCL_CONNECT_TIMEOUT": "120",
        "HCCL_RDMA_TIMEOUT": "20",
        "ASCEND_TRANSFER_TIMEOUT": "5000",
    }
    found = deadlines(vendor, "roce")
    assert (found.connect_ms, found.transfer_ms) == (120_000, 5000)
    assert deadlines({**vendor, "ASCEND_CONNECT_TIMEOUT": "7"}, "roce").connect_ms == 7


@pytest.mark.parametrize(
    "vendor",
    [{"HCCL_RDMA_TIMEOUT": "25"}, {"HCCL_RDMA_RETRY_CNT": "0"}, {"HCCL_RDMA_TIMEOUT": "x"}],
)
def test_invalid_setting_is_named(vendor: dict[str, str]) -> None:
    (name,) = vendor
    with pytest.raises(HalError, match=f"{name}='{vendor[name]}' must be a whole number from"):
        deadlines(vendor, "roce")


def test_mooncake_reserves_a_thousand_ports_per_npu() -> None:
    assert engine_ports("mooncake", {}, [2, 3]) == (
        ReservedPorts("the mooncake engine's links", PortRange(22000, 24000), "ASCEND_BASE_PORT"),
        ReservedPorts(
            "the mooncake engine's handshakes",
            PortRange(15000, 17000),
            "MC_MIN_RPC_PORT and MC_MAX_RPC_PORT",
        ),
    )
    moved = engine_ports("mooncake", {"ASCEND_BASE_PORT": "30000"}, [0])
    assert moved[0].ports == PortRange(30000, 31000)


def test_memfabric_reserves_its_configured_ports() -> None:
    vendor = {"MF_CONFIG_STORE_PORT_START": "40000", "MF_CONFIG_STORE_PORT_END": "40100"}
    [store] = engine_ports("memfabric", vendor, [0])
    assert (store.what, store.ports) == ("memfabric's store", PortRange(40000, 40100))
    assert store.setting == "MF_CONFIG_STORE_PORT_START and MF_CONFIG_STORE_PORT_END"


def test_invalid_port_ranges_are_rejected() -> None:
    with pytest.raises(HalError, match="leads to port 66000; choose a base of at most 49535"):
        engine_ports("mooncake", {"ASCEND_BASE_PORT": "50000"}, list(range(16)))
    with pytest.raises(HalError, match="ASCEND_BASE_PORT='80' must be a port"):
        engine_ports("mooncake", {"ASCEND_BASE_PORT": "80"}, [0])
    with pytest.raises(HalError, match="MC_MIN_RPC_PORT and MC_MAX_RPC_PORT: wanted a range of po"):
        engine_ports("mooncake", {"MC_MIN_RPC_PORT": "17001"}, [0])


def test_port_in_a_reserved_range_has_a_reason() -> None:
    ranges = engine_ports("mooncake", {}, [0])
    assert reservation_conflict("HTTP", PortRange(19999, 19999), ranges) is None
    assert reservation_conflict("HTTP", PortRange(20000, 20000), ranges) == (
        "port 20000, wanted for HTTP, lies in 20000-21000, from which the mooncake engine's "
        "links may take any port at any time; choose one outside, or move that range "
        "(ASCEND_BASE_PORT)"
    )
