"""The ``mooncake-hal`` command: what this machine can run, and how fast it moves KV."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace

from mooncake_hal import __version__, hal_env
from mooncake_hal.command_line import CommandParser, DefaultsInHelp, load_development_module
from mooncake_hal.errors import HalError, PluginError
from mooncake_hal.registry import PluginStatus, Registry, TableRow


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the process's exit status."""
    parser = build_parser()
    options, rest = parser.parse_known_args(arguments)
    if rest and options.run not in (run_transfer, run_doctor):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    try:
        status = int(options.run(options, rest))
        sys.stdout.flush()
    except HalError as exc:
        print(f"mooncake-hal: {exc}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT  # the shells' convention; the interrupt needs no traceback
    except BrokenPipeError:
        # the reader closed the pipe, as `head` does; without this, the interpreter's flush at exit
        # would fail again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return status


def build_parser() -> argparse.ArgumentParser:
    """The command line of ``mooncake-hal``."""
    parser = CommandParser(prog="mooncake-hal", description=__doc__)
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(required=True, metavar="command")
    about = "backends, devices and transports, and why one is unavailable"
    devices = commands.add_parser("devices", help=about, description=about)
    devices.add_argument("--json", action="store_true", help="print JSON")
    devices.set_defaults(run=show_devices)
    about = "print versions, devices, RDMA and limits, for a bug report"
    collect = commands.add_parser("collect-env", help=about, description=about)
    collect.add_argument("--json", action="store_true", help="print JSON")
    collect.set_defaults(run=lambda options, _: collect_env(as_json=options.json))
    bench = commands.add_parser("bench", help="measure this machine")
    measured = bench.add_subparsers(required=True, metavar="what")
    # it parses its own arguments, including --help, so that its module is imported only if it runs
    transfer = measured.add_parser(
        "transfer", help="KV transfer between two processes", add_help=False
    )
    transfer.set_defaults(run=run_transfer)
    doctor = commands.add_parser(
        "doctor", help="check a deployment plan, a host or a live peer", add_help=False
    )
    doctor.set_defaults(run=run_doctor)
    return parser


def run_doctor(_: argparse.Namespace, rest: list[str]) -> int:
    """Check a deployment; ``rest`` has the arguments that ``mooncake_hal.doctor`` declares."""
    from mooncake_hal import doctor

    parser = CommandParser(
        prog="mooncake-hal doctor", description=doctor.__doc__, formatter_class=DefaultsInHelp
    )
    doctor.add_arguments(parser)
    return doctor.run(parser.parse_args(rest))


def run_transfer(_: argparse.Namespace, rest: list[str]) -> int:
    """Measure KV transfer; ``rest`` has the arguments that ``mooncake_hal.bench`` declares."""
    bench = load_development_module("mooncake_hal.bench")
    parser = CommandParser(
        prog="mooncake-hal bench transfer",
        description=bench.__doc__,
        formatter_class=DefaultsInHelp,
    )
    bench.add_arguments(parser)
    return int(bench.run(parser.parse_args(rest)))


def show_devices(options: argparse.Namespace, _: list[str]) -> int:
    """Print the tables; the exit status is 0 if any backend is available, otherwise 1."""
    registry = Registry.discover()
    found = describe(registry)
    auto = _auto_backend(registry)
    if options.json:
        print(json.dumps({**found, "auto": auto}, indent=2))
    else:
        print(f"{format_tables(found)}\n\n--backend auto: {auto}")
    backends = found["backends"]
    return 0 if any(row["status"] == PluginStatus.AVAILABLE.value for row in backends) else 1


def _auto_backend(registry: Registry) -> str:
    """What ``--backend auto`` stands for here: a name, or why there is none."""
    name = registry.backend_name()
    if name:
        return name
    wanted = hal_env.backend_name()
    return f"none: MOONCAKE_HAL_BACKEND={wanted} is not installed" if wanted else "none"


def collect_env(*, as_json: bool = False) -> int:
    """Print versions, devices, transports, RDMA, limits and environment. The exit status is always
    0, since things that do not work are part of the report."""
    from mooncake_hal.machine_report import machine_report

    report = machine_report()
    found = describe(Registry.discover())
    if as_json:
        print(json.dumps({**report.sections, **found}, indent=2))
    else:
        print(f"{report.text()}\n## Hardware layer\n{format_tables(found)}")
    return 0


def describe(registry: Registry) -> dict[str, list[dict[str, object]]]:
    """The content of all tables as plain data."""
    devices: list[dict[str, object]] = []
    backends = [_load_devices(registry, row, devices) for row in registry.backend_table()]
    return {
        "backends": [_plain(row) for row in backends],
        "devices": devices,
        "transports": [_plain(row) for row in registry.transport_table()],
        "not_loaded": [_plain(row) for row in registry.not_loaded],
    }


def _load_devices(registry: Registry, row: TableRow, devices: list[dict[str, object]]) -> TableRow:
    """Append an available backend's devices to ``devices``. Returns the backend's row, with the
    status corrected if it does not load."""
    if row.status is not PluginStatus.AVAILABLE:
        return row
    try:
        backend = registry.select_backend(row.name)
        devices += [{"backend": row.name, **asdict(info)} for info in backend.runtime.devices()]
    except HalError as exc:
        broken = isinstance(exc, PluginError)
        status = PluginStatus.BROKEN if broken else PluginStatus.UNAVAILABLE
        return replace(row, status=status, reason=str(exc))
    return row


def _plain(row: TableRow) -> dict[str, object]:
    return {**asdict(row), "status": row.status.value}


def format_tables(found: dict[str, list[dict[str, object]]]) -> str:
    """Format the tables as text; tables without rows are left out."""
    parts = []
    for key, title, columns in _TABLES:
        if found[key]:
            rows = [[_cell(column, row[column]) for column in columns] for row in found[key]]
            parts.append(_format(title, columns, rows))
    return "\n\n".join(parts)


_TABLES: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("backends", "Backends", ("name", "status", "priority", "reason")),
    ("devices", "Devices", ("backend", "index", "name", "generation", "total_bytes")),
    ("transports", "Transports", ("name", "status", "priority", "reason")),
    ("not_loaded", "Plugins that were not loaded", ("name", "status", "reason")),
)


def _format(title: str, columns: Sequence[str], rows: list[list[str]]) -> str:
    lines = [list(columns), *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    text = [
        "  "
        + "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]
    return "\n".join([title, *text])


def _cell(column: str, value: object) -> str:
    if column.endswith("_bytes") and isinstance(value, int):
        return f"{value / (1 << 30):.1f} GiB"
    return "-" if value is None or value == "" else str(value)
