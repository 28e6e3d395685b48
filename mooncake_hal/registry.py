"""The registry of plugins: discovers them, and selects a backend or a transport by name.

Entry points of the group ``mooncake_hal`` are loaded one by one, each into a plugin manager of its
own. A plugin that fails to load becomes a table row with its reason and never stops the process.
Two plugins that offer the same name are an error, since neither choice would be right.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from types import ModuleType
from typing import TYPE_CHECKING, TypeVar, overload

import pluggy

from mooncake_hal import hal_env, hookspecs
from mooncake_hal.errors import (
    BackendNotFound,
    BackendUnavailable,
    HalError,
    PluginError,
    TransportUnavailable,
)
from mooncake_hal.known_hardware import KNOWN_HARDWARE, HardwareInfo
from mooncake_hal.specs import (
    API_VERSION,
    Availability,
    BackendSpec,
    TransportSpec,
)

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from mooncake_hal.backend import Backend
    from mooncake_hal.host_copies import HostCopies
    from mooncake_hal.transport import Transport

ENTRY_POINT_GROUP = "mooncake_hal"

logger = logging.getLogger(__name__)

Spec = TypeVar("Spec", BackendSpec, TransportSpec)


class PluginStatus(str, Enum):
    """The state of a plugin, or of a backend or transport that it offers."""

    AVAILABLE = "available"
    """The probe found everything that it needs."""
    UNAVAILABLE = "unavailable"
    """The plugin works, but its hardware, driver or library is missing."""
    ABSENT = "absent"
    """The entry point names a module that is not installed."""
    BROKEN = "broken"
    """The plugin or its probe fails, or violates the contract."""
    BLOCKED = "blocked"
    """MOONCAKE_HAL_BLOCK names it; it was not imported."""


@dataclass(frozen=True, slots=True)
class TableRow:
    """One row of a table: a backend, a transport, or a plugin that was not loaded.

    Args:
        name: the spec's name; the entry point's name for a plugin that was not loaded.
        status: the state of the row's backend, transport or plugin.
        reason: why it is not available, or what the probe found.
        priority: the spec's priority; None for a plugin that was not loaded.
        plugin: the module that the entry point names.
    """

    name: str
    status: PluginStatus
    reason: str
    priority: int | None
    plugin: str


@dataclass(slots=True)
class Registry:
    """The backends and transports of the installed plugins. Construct it with ``discover``.

    Args:
        backends, transports: (spec, name of the plugin's module) by the spec's name.
        not_loaded: plugins that are absent, broken or blocked, with their reasons.
    """

    backends: dict[str, tuple[BackendSpec, str]] = field(default_factory=dict)
    transports: dict[str, tuple[TransportSpec, str]] = field(default_factory=dict)
    not_loaded: list[TableRow] = field(default_factory=list)

    @classmethod
    def discover(cls, points: Iterable[EntryPoint] | None = None) -> Registry:
        """Load every installed plugin.

        Args:
            points: entry points to load instead of the installed ones.

        Raises:
            PluginError: two plugins offer the same name.
            HalError: MOONCAKE_HAL_BLOCK can't be parsed.
        """
        registry = cls()
        blocked = hal_env.blocked_plugins()
        if points is None:
            from importlib.metadata import entry_points  # slow to import; not needed for --help

            points = entry_points(group=ENTRY_POINT_GROUP)
        # stale metadata can list an entry point twice, which is no conflict: load it once
        for _, point in sorted({(point.name, point.value): point for point in points}.items()):
            if point.name in blocked:
                registry._record_failure(
                    point, PluginStatus.BLOCKED, "blocked by MOONCAKE_HAL_BLOCK"
                )
            else:
                registry._load(point)
        return registry

    def backend_table(self) -> list[TableRow]:
        """Probe every backend; highest priority first."""
        return _table(self.backends.values())

    def transport_table(self) -> list[TableRow]:
        """Probe every transport; highest priority first."""
        return _table(self.transports.values())

    def select_backend(self, name: str = "auto") -> Backend:
        """Load a backend.

        Args:
            name: its name. ``"auto"`` selects MOONCAKE_HAL_BACKEND if that is set, otherwise the
                available backend with the highest priority, which must not be below zero.

        Raises:
            BackendNotFound: no plugin offers it; the message lists the installed backends.
            BackendUnavailable: its hardware can't be used, according to the probe or to ``load``;
                the reason says why.
            PluginError: its plugin is broken, or the loaded backend violates the contract; the
                message lists the violations.
        """
        wanted = hal_env.backend_name() if name == "auto" else name
        if wanted is None:
            return self._best_backend()
        if wanted not in self.backends:
            self._raise_if_broken(wanted)
            raise BackendNotFound(
                f"no installed plugin offers backend {wanted!r}; installed backends: "
                f"{sorted(self.backends)}. Install its package, or see `mooncake-hal devices`"
            )
        spec, plugin = self.backends[wanted]
        row = _probe(spec, plugin)
        if row.status is PluginStatus.UNAVAILABLE:
            raise BackendUnavailable(wanted, row.reason)
        _require_available(row)
        return _load_backend(spec, plugin)

    def backend_name(self, name: str = "auto") -> str:
        """Name of the backend that ``select_backend`` would load, without loading it; empty if
        there is none.

        Args:
            name: as ``select_backend`` takes it.
        """
        wanted = hal_env.backend_name() if name == "auto" else name
        if wanted is None:
            usable = (
                row.name
                for row in self.backend_table()
                if row.status is PluginStatus.AVAILABLE and (row.priority or 0) >= 0
            )
            wanted = next(usable, "")
        return wanted if wanted in self.backends else ""

    def device_type(self, name: str = "auto") -> str:
        """Torch's name of a backend's device type, without loading the backend; empty if its device
        is the host, or if there is no such backend.

        Args:
            name: as ``select_backend`` takes it.
        """
        wanted = self.backend_name(name)
        return self.backends[wanted][0].device_type if wanted else ""

    def host_copies(self, device: str) -> HostCopies:
        """Return the host copies of a device, from the backend that offers them.

        Args:
            device: the device's name, such as ``"cuda:0"``.

        Raises:
            BackendUnavailable: no installed backend offers host copies for this device type, or the
                backend is unavailable here.
            DeviceError: there is no such device.
        """
        kind, _, index = device.partition(":")
        for spec, _ in self.backends.values():
            if spec.device_type == kind and spec.host_copies is not None:
                return spec.host_copies(int(index or 0))
        packages = [
            f"mooncake-hal-{name}" for name, known in KNOWN_HARDWARE.items() if known.generations
        ]
        raise BackendUnavailable(
            kind,
            "no installed backend offers host copies for this device type; install the package of "
            f"its backend, {' or '.join(packages)}",
        )

    def known_hardware(self, backend: str) -> HardwareInfo | None:
        """Return the description of a backend's hardware, which need not be present; None if there
        is no description."""
        if backend in self.backends and (known := self.backends[backend][0].hardware) is not None:
            return known
        return KNOWN_HARDWARE.get(backend)

    def load_transport(self, name: str) -> Transport:
        """Load a transport.

        Raises:
            TransportUnavailable: no plugin offers it, or the host lacks what it needs.
            PluginError: the plugin that should offer it is broken.
        """
        if name not in self.transports:
            self._raise_if_broken(name)
            raise TransportUnavailable(
                name, f"no plugin offers it; installed transports: {sorted(self.transports)}"
            )
        spec, plugin = self.transports[name]
        row = _probe(spec, plugin)
        if row.status is PluginStatus.UNAVAILABLE:
            raise TransportUnavailable(name, row.reason)
        _require_available(row)
        return _loaded(spec, plugin)

    def _best_backend(self) -> Backend:
        refusals = []
        for row in self.backend_table():
            if row.priority is None or row.priority < 0:
                continue
            if row.status is not PluginStatus.AVAILABLE:
                refusals.append(f"{row.name}: {row.reason}")
                continue
            try:
                return _load_backend(*self.backends[row.name])
            except BackendUnavailable as exc:
                logger.warning("backend auto: %s; trying the next one", exc)
                refusals.append(f"{row.name}: {exc.reason}")
        refusals += [f"{row.name}: {row.reason}" for row in self.not_loaded]
        raise BackendUnavailable("auto", "; ".join(refusals) or "no backend plugin is installed")

    def _raise_if_broken(self, name: str) -> None:
        for row in self.not_loaded:
            if row.name == name:
                _require_available(row)

    def _load(self, point: EntryPoint) -> None:
        try:
            module = point.load()
            backends, transports = _offers(module)
        except ModuleNotFoundError as exc:
            self._record_failure(point, *_missing_module(point, exc))
            return
        except Exception as exc:  # noqa: BLE001  the door to foreign code; the reason is kept
            self._record_failure(point, PluginStatus.BROKEN, f"{type(exc).__name__}: {exc}")
            return
        for backend in backends:
            _add_unique(self.backends, backend, point)
        for transport in transports:
            _add_unique(self.transports, transport, point)

    def _record_failure(self, point: EntryPoint, status: PluginStatus, reason: str) -> None:
        if status is not PluginStatus.BLOCKED:
            logger.warning(
                "plugin %s (%s) is %s: %s", point.name, point.value, status.value, reason
            )
        self.not_loaded.append(TableRow(point.name, status, reason, None, point.value))


def _require_available(row: TableRow) -> None:
    """Raise PluginError for a row that is not available because of its plugin, not the machine."""
    if row.status is not PluginStatus.AVAILABLE:
        raise PluginError(f"plugin {row.name!r} ({row.plugin}) is {row.status.value}: {row.reason}")


def _load_backend(spec: BackendSpec, plugin: str) -> Backend:
    """Load a backend and check it against the contract; raises PluginError if it violates it."""
    from mooncake_hal.contract import find_violations

    backend = _loaded(spec, plugin)
    found = find_violations(backend)
    if found:
        raise PluginError(
            f"backend {spec.name!r} ({plugin}) violates the contract of this mooncake_hal "
            f"(mooncake_hal/backend.py): {'; '.join(found)}. Install matching versions of both"
        )
    return backend


@overload
def _loaded(spec: BackendSpec, plugin: str) -> Backend: ...


@overload
def _loaded(spec: TransportSpec, plugin: str) -> Transport: ...


def _loaded(spec: BackendSpec | TransportSpec, plugin: str) -> Backend | Transport:
    try:
        return spec.load()
    except HalError:
        raise
    except Exception as exc:  # the door to foreign code
        logger.debug("loading %r", spec.name, exc_info=True)
        raise PluginError(
            f"plugin {spec.name!r} ({plugin}) is broken: its load failed: "
            f"{type(exc).__name__}: {exc}"
        ) from exc


def _missing_module(point: EntryPoint, exc: ModuleNotFoundError) -> tuple[PluginStatus, str]:
    """Distinguish a plugin that is not installed from one whose own import failed."""
    wanted = point.module
    if exc.name is not None and (wanted == exc.name or wanted.startswith(f"{exc.name}.")):
        return PluginStatus.ABSENT, f"module {exc.name!r} is not installed"
    return PluginStatus.BROKEN, f"it imports {exc.name!r}, which is not installed"


def _offers(module: ModuleType) -> tuple[list[BackendSpec], list[TransportSpec]]:
    """Call a plugin's hooks and return the backends and transports that it offers.

    Raises:
        PluginError: it offers nothing, or a spec that violates the contract.
        pluggy.PluginValidationError: it implements an unknown hook, or one with other parameters.
    """
    manager = pluggy.PluginManager(hookspecs.PROJECT_NAME)
    manager.add_hookspecs(hookspecs)
    manager.register(module)
    manager.check_pending()
    backends = manager.hook.mooncake_hal_backend()
    transports = manager.hook.mooncake_hal_transport()
    if not backends and not transports:
        raise PluginError("it implements neither mooncake_hal_backend nor mooncake_hal_transport")
    for spec in backends:
        _check_spec(spec, BackendSpec)
    for spec in transports:
        _check_spec(spec, TransportSpec)
    return backends, transports


def _check_spec(spec: object, kind: type[BackendSpec] | type[TransportSpec]) -> None:
    if not isinstance(spec, kind):
        raise PluginError(f"its hook returned {type(spec).__name__}, wanted {kind.__name__}")
    if spec.api_version != API_VERSION:
        raise PluginError(
            f"{spec.name!r} was written for plugin API {spec.api_version}, this is {API_VERSION}; "
            "install matching versions of both"
        )
    if spec.name == "auto" or not hal_env.is_name(spec.name):
        raise PluginError(
            f"{spec.name!r} is not a valid name: use lower-case letters, digits, '-' and '_', "
            "and not 'auto'"
        )


def _add_unique(held: dict[str, tuple[Spec, str]], spec: Spec, point: EntryPoint) -> None:
    if spec.name in held:
        raise PluginError(
            f"{spec.name!r} is offered by both {held[spec.name][1]} and {point.value}; uninstall "
            f"one of them, or block it with MOONCAKE_HAL_BLOCK={point.name}"
        )
    held[spec.name] = (spec, point.value)


def _table(offers: Iterable[tuple[BackendSpec, str] | tuple[TransportSpec, str]]) -> list[TableRow]:
    rows = [_probe(spec, plugin) for spec, plugin in offers]
    return sorted(rows, key=lambda row: (-(row.priority or 0), row.name))


def _probe(spec: BackendSpec | TransportSpec, plugin: str) -> TableRow:
    try:
        answer = spec.probe()
        status = PluginStatus.AVAILABLE if answer.ok else PluginStatus.UNAVAILABLE
    except Exception as exc:  # noqa: BLE001  the door to foreign code; the reason is kept
        answer = Availability(False, f"its probe failed: {type(exc).__name__}: {exc}")
        status = PluginStatus.BROKEN
    return TableRow(spec.name, status, answer.reason, spec.priority, plugin)
