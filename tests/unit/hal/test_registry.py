"""The plugin registry: discovery, selection, rejected plugins, and the reasons it reports."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import EntryPoint
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from mooncake_hal.backend import Backend
from mooncake_hal.errors import (
    BackendNotFound,
    BackendUnavailable,
    HalError,
    PluginError,
    TransportUnavailable,
)
from mooncake_hal.hookspecs import hookimpl
from mooncake_hal.null.null_backend import NullBackend, NullOps, NullRuntime
from mooncake_hal.registry import PluginStatus, Registry
from mooncake_hal.specs import API_VERSION, Availability, BackendSpec, TransportSpec
from mooncake_hal.transport import Transport


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MOONCAKE_HAL_BACKEND", "MOONCAKE_HAL_BLOCK"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def plugins() -> Iterator[Plugins]:
    made = Plugins()
    yield made
    made.remove()


class Plugins:
    """Plugin modules that exist for one test."""

    def __init__(self) -> None:
        self.points: list[EntryPoint] = []

    def add(self, name: str, **members: Any) -> None:
        module = ModuleType(f"plugin_of_test_{len(self.points)}")
        for key, value in members.items():
            setattr(module, key, value)
        sys.modules[module.__name__] = module
        self.point(name, module.__name__)

    def point(self, name: str, module: str) -> None:
        self.points.append(EntryPoint(name, module, "mooncake_hal"))

    def backend(self, name: str, priority: int = 0, reason: str = "", **changes: Any) -> None:
        settings: dict[str, Any] = {
            "name": name,
            "api_version": API_VERSION,
            "priority": priority,
            "probe": lambda: Availability(not reason, reason),
            "load": lambda: backend_named(name),
        }
        spec = BackendSpec(**{**settings, **changes})
        self.add(name, mooncake_hal_backend=hookimpl(named("mooncake_hal_backend", spec)))

    def transport(self, name: str, reason: str = "") -> None:
        spec = TransportSpec(
            name,
            API_VERSION,
            10,
            lambda: Availability(not reason, reason),
            lambda: SimpleNamespace(name=name),
        )
        self.add(name, mooncake_hal_transport=hookimpl(named("mooncake_hal_transport", spec)))

    def discover(self) -> Registry:
        return Registry.discover(self.points)

    def remove(self) -> None:
        for point in self.points:
            sys.modules.pop(point.value, None)


def backend_named(name: str) -> NullBackend:
    backend = NullBackend()
    backend.name = name
    return backend


def named(name: str, answer: object) -> Any:
    def hook() -> object:
        return answer

    hook.__name__ = name
    return hook


def chosen(loaded: Backend | Transport) -> str:
    return loaded.name


def refusal(registry: Registry) -> tuple[PluginStatus, str]:
    (row,) = registry.not_loaded
    return row.status, row.reason


def test_auto_selects_the_available_backend_of_highest_priority(plugins: Plugins) -> None:
    plugins.backend("slow", 0)
    plugins.backend("fast", 90)
    plugins.backend("fastest", 100, reason="no device")
    assert chosen(plugins.discover().select_backend()) == "fast"


def test_auto_never_selects_a_negative_priority(plugins: Plugins) -> None:
    plugins.backend("null", -1)
    with pytest.raises(BackendUnavailable, match="no backend plugin"):
        plugins.discover().select_backend()
    assert chosen(plugins.discover().select_backend("null")) == "null"


def test_auto_reports_why_each_backend_was_rejected(plugins: Plugins) -> None:
    plugins.backend("a", 90, reason="no driver")
    plugins.point("b", "module_that_is_nowhere")
    with pytest.raises(BackendUnavailable, match=r"a: no driver; b: module .* not installed"):
        plugins.discover().select_backend()


def test_auto_continues_when_a_load_fails(
    plugins: Plugins, caplog: pytest.LogCaptureFixture
) -> None:
    def load() -> Any:
        raise BackendUnavailable("hopeful", "0 devices after all")

    plugins.backend("hopeful", 90, load=load)
    plugins.backend("slow", 0)
    assert chosen(plugins.discover().select_backend()) == "slow"
    assert "0 devices after all" in caplog.text


def test_failed_load_is_reported_in_one_line(plugins: Plugins) -> None:
    def load() -> Any:
        raise RuntimeError("driver says 507015")

    plugins.backend("odd", load=load)
    with pytest.raises(PluginError, match=r"'odd' .* load failed: RuntimeError: driver says 5"):
        plugins.discover().select_backend("odd")


class OldOps(NullOps):
    """Ops of an older contract: without ``silu_mul``, and with another signature of the norm."""

    silu_mul: Any = None

    def rms_norm(self, x: Any) -> Any:  # type: ignore[override]  # on purpose
        return x


@pytest.mark.parametrize("name", ["auto", "old"])
def test_backend_of_an_older_contract_is_rejected_with_what_it_lacks(
    plugins: Plugins, name: str
) -> None:
    class OldRuntime(NullRuntime):
        peak_bytes: Any = None

    backend = backend_named("old")
    backend.ops, backend.runtime = OldOps(), OldRuntime()
    plugins.backend("old", load=lambda: backend)
    with pytest.raises(PluginError) as caught:
        plugins.discover().select_backend(name)
    assert (
        "no runtime.peak_bytes; ops.rms_norm does not accept the arguments (x, weight, "
        "eps); no ops.silu_mul. Install matching versions" in str(caught.value)
    )


def test_claimed_capability_without_methods_is_rejected(plugins: Plugins) -> None:
    backend = backend_named("bold")
    backend.capabilities = replace(
        backend.capabilities,
        sampling=True,
        kv_dtypes=("float8_e4m3fn",),
        native_latents=True,
        fused_rope_writes=True,
        quantization=("fp8", "fp8_experts"),
    )
    plugins.backend("bold", load=lambda: backend)
    lacking = (
        "no ops.sample; no ops.with_kv_scales; no ops.convert_latents; no ops.with_native_latents"
    )
    lacking += "; no ops.rope_and_write_kv; no ops.fp8_linear; no ops.pack_fp8_weight"
    lacking += "; no ops.fp8_moe; no ops.pack_fp8_experts; no ops.unpack_fp8_experts"
    with pytest.raises(PluginError, match=lacking):
        plugins.discover().select_backend("bold")


@pytest.mark.parametrize(
    ("loaded", "lacking"),
    [
        (None, "no capabilities; no communicator; no memory; no name; no ops; no runtime"),
        (SimpleNamespace(**dict.fromkeys(dir(Backend))), "capabilities of type NoneType, wanted C"),
    ],
)
def test_object_that_is_no_backend_is_rejected(
    plugins: Plugins, loaded: object, lacking: str
) -> None:
    plugins.backend("odd", load=lambda: loaded)
    with pytest.raises(PluginError, match=lacking):
        plugins.discover().select_backend("odd")


def test_environment_overrides_only_auto(plugins: Plugins, monkeypatch: pytest.MonkeyPatch) -> None:
    plugins.backend("slow", 0)
    plugins.backend("fast", 90)
    monkeypatch.setenv("MOONCAKE_HAL_BACKEND", "slow")
    assert chosen(plugins.discover().select_backend("auto")) == "slow"
    assert chosen(plugins.discover().select_backend("fast")) == "fast"


def test_unknown_backend_is_rejected_with_the_installed_names(plugins: Plugins) -> None:
    plugins.backend("slow")
    with pytest.raises(BackendNotFound, match=r"'quick'; installed backends: \['slow'\]"):
        plugins.discover().select_backend("quick")


def test_unavailable_backend_keeps_its_reason(plugins: Plugins) -> None:
    plugins.backend("fast", reason="no driver")
    with pytest.raises(BackendUnavailable, match="'fast' is unavailable: no driver") as caught:
        plugins.discover().select_backend("fast")
    assert (caught.value.name, caught.value.reason) == ("fast", "no driver")


def test_backend_table_is_sorted_and_complete(plugins: Plugins) -> None:
    plugins.backend("slow", 0)
    plugins.backend("fast", 90, reason="no driver")
    rows = plugins.discover().backend_table()
    assert [(row.name, row.status, row.reason) for row in rows] == [
        ("fast", PluginStatus.UNAVAILABLE, "no driver"),
        ("slow", PluginStatus.AVAILABLE, ""),
    ]


def test_probe_that_raises_is_broken(plugins: Plugins) -> None:
    def probe() -> Availability:
        raise RuntimeError("probe fell over")

    plugins.backend("bad", probe=probe)
    (row,) = plugins.discover().backend_table()
    assert row.status is PluginStatus.BROKEN
    assert "RuntimeError: probe fell over" in row.reason
    with pytest.raises(PluginError, match=r"'bad' .* is broken: its probe failed"):
        plugins.discover().select_backend("bad")


def test_missing_plugin_is_absent(plugins: Plugins) -> None:
    plugins.point("gone", "module_that_is_nowhere.plugin")
    assert refusal(plugins.discover()) == (
        PluginStatus.ABSENT,
        "module 'module_that_is_nowhere' is not installed",
    )


def test_plugin_with_a_missing_library_is_broken(
    plugins: Plugins, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "plugin_that_needs.py").write_text("import library_that_is_nowhere\n")
    monkeypatch.syspath_prepend(tmp_path)
    plugins.point("needy", "plugin_that_needs")
    plugins.backend("fine")
    registry = plugins.discover()
    assert refusal(registry) == (
        PluginStatus.BROKEN,
        "it imports 'library_that_is_nowhere', which is not installed",
    )
    assert chosen(registry.select_backend("fine")) == "fine"
    with pytest.raises(PluginError, match=r"'needy' .* is broken: it imports"):
        registry.select_backend("needy")


def test_plugin_that_raises_at_import_is_broken(
    plugins: Plugins, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "plugin_that_raises.py").write_text("raise OSError('no such driver')\n")
    monkeypatch.syspath_prepend(tmp_path)
    plugins.point("raises", "plugin_that_raises")
    assert refusal(plugins.discover()) == (PluginStatus.BROKEN, "OSError: no such driver")


def test_plugin_of_another_api_version_is_broken(plugins: Plugins) -> None:
    plugins.backend("old", api_version=0)
    status, reason = refusal(plugins.discover())
    assert status is PluginStatus.BROKEN
    assert "written for plugin API 0, this is 1" in reason


@pytest.mark.parametrize("name", ["auto", "Upper", "with space", ""])
def test_plugin_with_an_invalid_name_is_broken(plugins: Plugins, name: str) -> None:
    plugins.backend(name)
    assert refusal(plugins.discover())[0] is PluginStatus.BROKEN


def test_hook_that_returns_no_spec_is_broken(plugins: Plugins) -> None:
    plugins.add("odd", mooncake_hal_backend=hookimpl(named("mooncake_hal_backend", "cuda")))
    assert "returned str, wanted BackendSpec" in refusal(plugins.discover())[1]


def test_plugin_without_hooks_is_broken(plugins: Plugins) -> None:
    plugins.add("empty")
    assert "implements neither" in refusal(plugins.discover())[1]


def test_plugin_with_an_unknown_hook_is_broken(plugins: Plugins) -> None:
    plugins.add("typo", mooncake_hal_bakend=hookimpl(named("mooncake_hal_bakend", None)))
    assert "unknown hook 'mooncake_hal_bakend'" in refusal(plugins.discover())[1]


def test_duplicate_name_is_an_error(plugins: Plugins) -> None:
    plugins.backend("fast")
    plugins.backend("fast")
    with pytest.raises(PluginError, match=r"offered by both .*uninstall one"):
        plugins.discover()


def test_one_module_listed_twice_is_one_plugin(plugins: Plugins) -> None:
    plugins.backend("fast")
    plugins.points.append(plugins.points[0])
    assert len(plugins.discover().backends) == 1


def test_blocked_plugin_is_not_imported(plugins: Plugins, monkeypatch: pytest.MonkeyPatch) -> None:
    plugins.point("fast", "module_that_is_nowhere")
    monkeypatch.setenv("MOONCAKE_HAL_BLOCK", "other, fast")
    assert refusal(plugins.discover()) == (PluginStatus.BLOCKED, "blocked by MOONCAKE_HAL_BLOCK")


@pytest.mark.parametrize("variable", ["MOONCAKE_HAL_BACKEND", "MOONCAKE_HAL_BLOCK"])
def test_invalid_environment_value_is_an_error(
    plugins: Plugins, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(variable, "Not A Name")
    with pytest.raises(HalError, match=f"{variable}: 'Not A Name' is not a valid name"):
        plugins.discover().select_backend()


def test_transports_are_loaded_by_name(plugins: Plugins) -> None:
    plugins.transport("near")
    plugins.transport("far", reason="no card")
    plugins.point("gone", "module_that_is_nowhere")
    registry = plugins.discover()
    assert chosen(registry.load_transport("near")) == "near"
    with pytest.raises(TransportUnavailable, match="'far' is unavailable: no card"):
        registry.load_transport("far")
    with pytest.raises(TransportUnavailable, match=r"installed transports: \['far', 'near'\]"):
        registry.load_transport("other")
    with pytest.raises(PluginError, match=r"'gone' .* is absent"):
        registry.load_transport("gone")
    assert {row.name for row in registry.transport_table()} == {"near", "far"}
