"""The command ``mooncake-hal bench transfer``: its arguments, and the measurement."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from mooncake_hal.bench.machine_limits import memcpy_mover
from mooncake_hal.bench.transfer_report import as_data, plot, table
from mooncake_hal.bench.transfer_speed import (
    Bandwidth,
    Latency,
    Mover,
    TransferShape,
    compare,
    latency,
    transport_mover,
)
from mooncake_hal.errors import NativeUnavailable, TransferError
from mooncake_hal.options import byte_count, positive_int
from mooncake_hal.registry import PluginStatus, Registry

MIB = 1 << 20
LATENCY_ROUNDS = 2000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to a parser."""
    parser.add_argument(
        "--transports",
        type=lambda text: [name.strip() for name in text.split(",") if name.strip()],
        metavar="NAME,...",
        help="transports to measure (default: every one that is available)",
    )
    parser.add_argument(
        "--size", type=positive_int, default=256, metavar="MIB", help="size of a transfer"
    )
    parser.add_argument(
        "--pieces",
        type=_sizes,
        default=(4096, 65536, MIB),
        metavar="BYTES,...",
        help="sizes of scattered pieces; one contiguous range is always measured",
    )
    parser.add_argument(
        "--rounds",
        type=positive_int,
        default=5,
        metavar="N",
        help="repetitions per shape and direction",
    )
    parser.add_argument(
        "--connections",
        type=positive_int,
        default=2,
        metavar="N",
        help="connections per peer; shm: threads",
    )
    parser.add_argument(
        "--anonymous",
        action="store_true",
        help="use host memory that the peer can't map (default: memory that it can map)",
    )
    parser.add_argument(
        "--devices",
        action="store_true",
        help="use memory of the default backend's first two devices (default: host memory)",
    )
    parser.add_argument("--json", type=_output, metavar="FILE", help="write the results as JSON")
    parser.add_argument("--plot", type=_output, metavar="FILE", help="write a plot of them as SVG")


def run(options: argparse.Namespace) -> int:
    """Run the measurement, print the table, write the files; returns the exit status."""
    names = options.transports
    if not names:
        rows = Registry.discover().transport_table()
        names = [row.name for row in rows if row.status is PluginStatus.AVAILABLE]
    bandwidths: list[Bandwidth] = []
    latencies: list[Latency] = []
    with ExitStack() as stack:
        movers, failed = _open(options, names, stack)
        total = options.size * MIB
        pieces = {size for size in options.pieces if size < total} | {total}
        for shape in (TransferShape(total, size) for size in sorted(pieces)):
            for operation in ("read", "write"):
                bandwidths += compare(movers, shape, operation, options.rounds).values()
        latencies += [
            latency(mover, 4096, LATENCY_ROUNDS) for mover in movers if mover.name in names
        ]
    sys.stdout.write(table(bandwidths, latencies) + "\n")
    if options.json is not None:
        options.json.write_text(json.dumps(as_data(bandwidths, latencies), indent=2) + "\n")
    if options.plot is not None:
        options.plot.write_text(plot(bandwidths))
    return 1 if failed or not names else 0


def _open(
    options: argparse.Namespace, names: Sequence[str], stack: ExitStack
) -> tuple[list[Mover], bool]:
    """Open all movers to measure; returns them, and whether any transport could not be opened."""
    size, movers, failed = options.size * MIB, [], False
    try:
        movers.append(stack.enter_context(memcpy_mover(size, options.connections)))
    except NativeUnavailable as exc:
        _complain(f"memcpy is not measured: {exc.reason}")
    for name in names:
        mover = transport_mover(
            name,
            size,
            options.connections,
            mappable=not options.anonymous,
            on_devices=options.devices,
        )
        try:
            movers.append(stack.enter_context(mover))
        except (TransferError, RuntimeError) as exc:
            failed = True
            _complain(f"{name} is not measured: {exc}")
    return movers, failed


def _complain(text: str) -> None:
    sys.stderr.write(f"mooncake-hal bench transfer: {text}\n")


def _sizes(text: str) -> tuple[int, ...]:
    try:
        sizes = tuple(byte_count(part) for part in text.split(","))
    except argparse.ArgumentTypeError:
        sizes = ()
    if not all(sizes) or not sizes:
        raise argparse.ArgumentTypeError(
            f"wanted sizes of 1 byte or more such as 4096,64KiB, got {text!r}"
        )
    return sizes


def _output(text: str) -> Path:
    """Parse the path of a file to write, after the measurement: its folder is checked before."""
    path = Path(text)
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"can't write {path}: there is no folder {path.parent}")
    return path
