"""The Mooncake and NIXL adapters without their engines: probes, settings, slices, messages."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from mooncake_hal.errors import HalError, PeerLost, TransferError, TransportUnavailable
from mooncake_hal.transport import EndpointOptions, Spans
from mooncake_hal.transports.adapters import (
    mooncake_agent as mooncake,
    mooncake_plugin,
    nixl_agent as nixl,
    nixl_plugin,
)
from mooncake_hal.transports.adapters.adapter_messages import (
    AdapterInfo,
    AgentDescription,
    decode_info,
    decode_message,
    unreachable_reason,
)
from mooncake_hal.transports.adapters.engine_agent import AdaptedEngine

NOTHING = ModuleType("an engine that is not asked")


def install(folder: Path, module: str, distribution: str) -> None:
    (folder / f"{module}.py").write_text("raise ImportError('libfabric.so.9 is missing')\n")
    info = folder / f"{distribution.replace('-', '_')}-9.9.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 9.9\n")


@pytest.mark.parametrize(
    ("plugin", "module", "distribution"),
    [
        (mooncake_plugin, "mooncake", "mooncake-transfer-engine"),
        (nixl_plugin, "nixl", "nixl-cu12"),
    ],
)
def test_probe_reports_missing_and_installed_libraries(
    plugin: ModuleType,
    module: str,
    distribution: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, module, raising=False)
    refusal = plugin.probe()
    assert not refusal.ok
    assert "is not installed: pip install" in refusal.reason
    install(tmp_path, module, distribution)
    found = plugin.probe()
    assert found.ok
    assert found.reason.startswith(f"{distribution} 9.9: ")


@pytest.mark.parametrize("spec", [mooncake_plugin, nixl_plugin])
def test_adapters_have_negative_priority(spec: ModuleType) -> None:
    assert spec.mooncake_hal_transport().priority < 0


def test_library_that_fails_to_load_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, "nixl", "nixl-cu12")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "nixl", raising=False)
    with pytest.raises(TransportUnavailable, match=r"nixl does not load: libfabric\.so\.9"):
        nixl_plugin.load()


def test_unknown_settings_are_rejected() -> None:
    options = EndpointOptions(extra={"protocols": "tcp"})
    with pytest.raises(ValueError, match=r"mooncake has no settings \['protocols'\]; it has"):
        mooncake.configure(NOTHING, options)
    with pytest.raises(ValueError, match=r"nixl has no settings \['protocols'\]"):
        nixl.configure(NOTHING, options)
    with pytest.raises(ValueError, match="must be one of"):
        mooncake.configure(NOTHING, EndpointOptions(extra={"protocol": "udp"}))


def test_environment_has_settings_for_every_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOONCAKE_HAL_MOONCAKE", "protocol=rdma devices=mlx5_0")
    assert mooncake.configure(NOTHING, EndpointOptions()).protocol == "rdma"
    options = EndpointOptions(extra={"protocol": "tcp"})
    assert mooncake.configure(NOTHING, options).protocol == "tcp"
    monkeypatch.setenv("MOONCAKE_HAL_NIXL", "backend=UCX engine=fast")
    with pytest.raises(HalError, match=r"MOONCAKE_HAL_NIXL: nixl has no setting \['engine'\]"):
        nixl.configure(NOTHING, EndpointOptions())


def test_slices_cover_every_byte_in_order_within_bounds() -> None:
    rng = np.random.default_rng(3)
    nbytes = rng.integers(1, 100_000, 500).astype(np.uint64)
    ends = np.cumsum(nbytes + np.uint64(8))
    spans = Spans(ends - nbytes, ends - nbytes + np.uint64(1 << 40), nbytes)
    engine = AdaptedEngine("any", "any", lambda serves: pytest.fail("not started"), 64, 1 << 20)
    slices = engine.cut(spans)
    assert all(len(part) <= 64 and part.total_bytes <= (1 << 20) + 4096 for part in slices)
    moved = np.concatenate([part.nbytes for part in slices])
    assert moved.sum() == spans.total_bytes
    for side in ("local", "remote"):
        found = np.concatenate([getattr(part, side) for part in slices])
        wanted = getattr(spans, side)
        assert set(wanted.tolist()) <= set(found.tolist())
        assert (found[1:] >= found[:-1] + moved[:-1]).all()


def test_malformed_peer_messages_are_rejected() -> None:
    with pytest.raises(TransferError, match="not the info of an adapter's endpoint"):
        decode_info(b"\xc1")
    with pytest.raises(PeerLost, match="wanted AgentDescription"):
        decode_message(b"\x93\x01\x02\x03", AgentDescription)


def test_engines_of_different_protocols_are_unreachable() -> None:
    assert unreachable_reason(AdapterInfo("tcp"), AdapterInfo("tcp")) is None
    reason = unreachable_reason(AdapterInfo("tcp"), AdapterInfo("rdma"))
    assert reason == "our engine speaks tcp, the peer's rdma"


@pytest.mark.parametrize(("device", "is_host", "number"), [("cpu", True, 0), ("cuda:3", False, 3)])
def test_nixl_distinguishes_host_and_device_memory(device: str, is_host: bool, number: int) -> None:
    place = nixl._region_info(device)
    assert (place.is_host, place.device) == (is_host, number)


def test_nixl_rejects_unknown_device_memory() -> None:
    with pytest.raises(TransportUnavailable, match="no memory of npu:0"):
        nixl._region_info("npu:0")
