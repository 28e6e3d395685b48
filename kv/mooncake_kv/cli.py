"""The ``mooncake-kv`` command: runs a node store as a process of its own, or inspects one."""

from __future__ import annotations

import argparse
import dataclasses
import errno
import ipaddress
import json
import logging
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from mooncake_hal import __version__  # one of all our packages
from mooncake_hal.command_line import LOG_FORMATS, CommandParser, DefaultsInHelp, LogSettings
from mooncake_hal.errors import AccessDenied, HalError, PortsExhausted
from mooncake_hal.negotiation import AUTO, Transports
from mooncake_hal.options import (
    Option,
    add_to_parser,
    byte_count,
    from_arguments,
    markdown_table,
    option,
    options_of,
    port_number,
)
from mooncake_hal.registry import Registry
from mooncake_hal.transport import EndpointOptions
from mooncake_kv.addresses import settle_addresses
from mooncake_kv.config import KVTransferConfig, read_secret
from mooncake_kv.errors import KVConfigError, KVError
from mooncake_kv.kv_events_config import KVEventsConfig, read_kv_events_config
from mooncake_kv.pool.pool_config import (
    DEFAULT_SSD_MIN_FREE_BYTES,
    host_and_port,
    ssd_directory,
    tenant_quota,
)
from mooncake_kv.store.chunk_store import Chunk, Tier
from mooncake_kv.store.eviction import DEFAULT_POLICY, POLICIES
from mooncake_kv.store.node_store import NodeStore, NodeStoreConfig
from mooncake_kv.store.ssd_config import SsdConfig, SsdDirectoryConfig
from mooncake_kv.store.store_client import StoreClient
from mooncake_kv.store.store_metrics import MetricsServer, prometheus_text
from mooncake_kv.store.store_service import StoreAddress, StoreService

logger = logging.getLogger(__name__)

DEFAULT_PORT = 7701
CONNECT_TIMEOUT_S = 10.0
DRAIN_S = 5.0
"""Seconds that a store waits at its end for loads and saves in flight; a second signal ends it."""
NETWORK_FIELDS = (
    "host",
    "advertise_host",
    "port_range",
    "transports",
    "secret",
    "allow_no_secret",
)

Found = TypeVar("Found")


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """Options of ``mooncake-kv store``, apart from those of the network."""

    dram: int = field(
        metadata=option(parse=byte_count, metavar="BYTES", help="memory for chunks, such as 64GiB")
    )
    ssd: tuple[tuple[Path, int], ...] = field(
        default=(),
        metadata=option(
            parse=ssd_directory,
            is_repeated=True,
            metavar="DIR:BYTES",
            help="a directory on an SSD for chunks that are used again, and how many bytes of it "
            "to use; repeat it for several drives",
        ),
    )
    port: int = field(
        default=DEFAULT_PORT,
        metadata=option(
            parse=port_number,
            metavar="PORT",
            help="port that clients connect to; 0 takes a free one",
        ),
    )
    metrics_port: int | None = field(
        default=None,
        metadata=option(
            parse=port_number,
            metavar="PORT",
            help="port on --kv-host that serves /metrics to Prometheus, without a secret; 0 takes "
            "a free one",
            default_text="no metrics",
        ),
    )
    policy: str = field(
        default=DEFAULT_POLICY,
        metadata=option("--eviction", choices=tuple(POLICIES), help="eviction policy"),
    )
    quotas: tuple[tuple[str, int], ...] = field(
        default=(),
        metadata=option(
            "--tenant-quota",
            parse=tenant_quota,
            is_repeated=True,
            metavar="TENANT=BYTES",
            help="memory limit of a tenant; repeat it; other tenants have no limit of their own",
        ),
    )
    quarantine_s: float = field(
        default=30.0,
        metadata=option(
            "--quarantine-seconds",
            metavar="SECONDS",
            help="how long memory is quarantined after a reader of it went silent or its writer "
            "ended; longer for users with a longer transfer timeout",
        ),
    )
    ssd_write_bytes_per_day: int = field(
        default=0,
        metadata=option(
            parse=byte_count,
            metavar="BYTES",
            help="limit of bytes written to all SSDs per day; 0 is no limit",
        ),
    )
    ssd_segment_bytes: int = field(
        default=256 << 20,
        metadata=option(parse=byte_count, metavar="BYTES", help="size of the files on SSDs"),
    )
    ssd_min_free_bytes: int = field(
        default=DEFAULT_SSD_MIN_FREE_BYTES,
        metadata=option(
            parse=byte_count,
            metavar="BYTES",
            help="free space to leave on each file system: no file is added that would leave less",
        ),
    )
    kv_events: KVEventsConfig | None = field(
        default=None,
        metadata=option(
            "--kv-events-config",
            parse=str,
            to_field=read_kv_events_config,
            default=None,
            metavar="JSON",
            help="publish to routers which chunks are held in memory and on SSDs, in vLLM's format "
            'and with its field names, such as {"enable_kv_cache_events": true, '
            '"replay_endpoint": "tcp://*:5558"}',
        ),
    )
    log_format: str = field(
        default="text",
        metadata=option(
            choices=LOG_FORMATS,
            help="format of log lines on stderr: text, or one JSON object per line",
        ),
    )

    def __post_init__(self) -> None:
        if not 0 <= self.quarantine_s <= 86_400:
            raise KVConfigError(
                f"--quarantine-seconds must be in [0, 86400], got {self.quarantine_s:g}"
            )

    def store_config(self) -> NodeStoreConfig:
        """The configuration of the store."""
        directories = tuple(
            SsdDirectoryConfig(path, size, self.ssd_segment_bytes, self.ssd_min_free_bytes)
            for path, size in self.ssd
        )
        ssd = SsdConfig(directories, self.ssd_write_bytes_per_day) if directories else None
        return NodeStoreConfig(
            self.dram,
            self.policy,
            self.quarantine_s,
            dict(self.quotas),
            ssd,
            kv_events=self.kv_events,
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the process's exit status."""
    options = build_parser().parse_args(arguments)
    try:
        return int(options.run(options))
    except KeyboardInterrupt:
        return 128 + signal.SIGINT  # the shells' convention; no traceback
    except (HalError, KVError, OSError) as exc:
        if isinstance(exc, BrokenPipeError):  # as `head` does; the interpreter flushes at its end
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        else:
            print(f"mooncake-kv: {exc}", file=sys.stderr)
        return 1


def build_parser() -> argparse.ArgumentParser:
    """The command line of ``mooncake-kv``."""
    parser = CommandParser(prog="mooncake-kv", description=__doc__)
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(required=True, metavar="command")

    def command(name: str, text: str, run: object) -> argparse.ArgumentParser:
        added = commands.add_parser(
            name, help=text, description=text, formatter_class=DefaultsInHelp
        )
        added.set_defaults(run=run)
        return added

    store = command("store", "run a node store until SIGINT or SIGTERM", run_store)
    add_to_parser(store, store_options())
    command("options", "print the options of `store` as a table for the docs", show_options)
    stats = command("stats", "print a store's counters", show_stats)
    form = stats.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON")
    form.add_argument("--prometheus", action="store_true", help="print Prometheus metrics")
    ls = command(
        "ls",
        "list the chunks of a store, one per line: tier, key, position, bytes, tenant",
        show_chunks,
    )
    ls.add_argument("--tier", choices=[tier.value for tier in Tier], help="only this tier")
    verify = command(
        "verify", "check every record on a store's SSDs, and drop damaged ones", verify_ssds
    )
    drop = command("drop", "drop chunks from all tiers of a store", drop_chunks)
    what = drop.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--key",
        action="append",
        type=_chunk_key,
        metavar="HEX",
        help="a chunk, by the key that ls prints; repeat it",
    )
    what.add_argument(
        "--tenant", metavar="NAME", help='all chunks of a tenant; "" for those without a tenant'
    )
    what.add_argument("--all", action="store_true", help="all chunks")
    ls.add_argument("--json", action="store_true", help="print one JSON object per line")
    for added in (verify, drop):
        added.add_argument("--json", action="store_true", help="print JSON")
    for added in (stats, ls, verify, drop):
        added.add_argument("--host", default="127.0.0.1", metavar="HOST", help="host of the store")
        added.add_argument(
            "--port",
            type=port_number,
            default=DEFAULT_PORT,
            metavar="PORT",
            help="port of the store",
        )
        added.add_argument(
            "--kv-secret-file", type=Path, metavar="FILE", help="file with the deployment's secret"
        )
    return parser


def store_options() -> list[Option]:
    """All options of ``mooncake-kv store``."""
    return [*options_of(StoreOptions), *options_of(KVTransferConfig, only=NETWORK_FIELDS)]


def show_options(_: argparse.Namespace) -> int:
    """Print the options of ``store`` in Markdown."""
    print(markdown_table(store_options()))
    return 0


def run_store(args: argparse.Namespace) -> int:
    """Run a store until a signal; prints its address once it listens."""
    options = from_arguments(StoreOptions, args)
    LogSettings(logging.INFO, options.log_format).apply()
    network = settle_addresses(from_arguments(KVTransferConfig, args))
    secret = network.secret.encode()
    store = NodeStore(options.store_config())
    try:
        transports = _open_transports(network, secret)
        try:
            address = StoreAddress(network.host, options.port, secret)
            with _Metrics(store, network.host, options.metrics_port):
                with _listening(network.host, options.port, "--port"):
                    service = StoreService.start(store, transports, address)
                try:
                    _serve(service, store, network.host)
                finally:
                    service.close()
        finally:
            transports.close()
    finally:
        store.close()
    return 0


def show_stats(args: argparse.Namespace) -> int:
    """Print counters, one per line."""
    with _Connected(args) as store:
        stats = _require(store.stats().result(), store, args)
    found = dataclasses.asdict(stats)
    if args.prometheus:
        print(prometheus_text(stats), end="")
        return 0
    if args.json:
        print(json.dumps(found, indent=2))
        return 0
    for name, value in found.items():
        shown = value
        if isinstance(value, dict):
            shown = ", ".join(f"{_printable(key)} {count}" for key, count in value.items())
        print(f"{name:<23} {shown}")
    return 0


def show_chunks(args: argparse.Namespace) -> int:
    """Print chunks: tier, key, position, bytes, tenant."""
    with _Connected(args) as store:
        for tier in Tier:
            if args.tier in (None, tier.value):
                for chunk in _require(store.list_chunks(tier), store, args):
                    _show_chunk(tier, chunk, as_json=args.json)
    return 0


def _show_chunk(tier: Tier, chunk: Chunk, *, as_json: bool) -> None:
    if as_json:
        found = {
            "tier": tier.value,
            "key": chunk.key.hex(),
            "parent": chunk.parent and chunk.parent.hex(),
            "position": chunk.position,
            "num_tokens": chunk.num_tokens,
            "nbytes": chunk.nbytes,
            "tenant": chunk.tenant,
        }
        print(json.dumps(found))
    else:
        tenant = _printable(chunk.tenant)
        print(tier.value, chunk.key.hex(), chunk.position, chunk.nbytes, tenant)


def verify_ssds(args: argparse.Namespace) -> int:
    """Check every record on the SSDs; the exit status is 1 if one was damaged."""
    with _Connected(args) as store:
        num_intact, num_damaged = _require(store.verify().result(), store, args)
    if args.json:
        print(json.dumps({"num_intact": num_intact, "num_damaged": num_damaged}))
    else:
        print(f"{num_intact} records are intact, {num_damaged} were damaged and have been dropped")
    return 1 if num_damaged else 0


def drop_chunks(args: argparse.Namespace) -> int:
    """Drop the named chunks."""
    with _Connected(args) as store:
        dropped = store.drop_matching(keys=args.key, tenant=args.tenant)
        num_dropped = _require(dropped.result(), store, args)
    print(
        json.dumps({"num_dropped": num_dropped}) if args.json else f"{num_dropped} chunks dropped"
    )
    return 0


def _open_transports(network: KVTransferConfig, secret: bytes) -> Transports:
    endpoint = EndpointOptions(
        host=network.host,
        advertise_host=network.advertise_host or None,
        port_range=network.port_range,
        secret=secret,
        allow_no_secret=network.allow_no_secret,
    )
    forced = network.transports
    return Transports.open(
        Registry.discover(),
        endpoint,
        wanted=forced[0] if len(forced) == 1 else AUTO,
        allowed=forced or None,
    )


def _serve(service: StoreService, store: NodeStore, host: str) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: service.stop())
    levels = store.stats()
    print(
        f"mooncake-kv: store listens on tcp://{host_and_port(host, service.port)} with "
        f"{levels.capacity_bytes / (1 << 30):.3g} GiB of memory, "
        f"{levels.ssd_capacity_bytes / (1 << 30):.3g} GiB on SSDs with {levels.ssd_chunks} chunks",
        flush=True,
    )
    service.wait()
    service.drain(DRAIN_S)


@contextmanager
def _listening(host: str, port: int, flag: str) -> Iterator[None]:
    """Say which address can't be listened on, and which option to change.

    Raises:
        KVConfigError: the block could not listen there.
    """
    try:
        yield
    except (PortsExhausted, OSError) as exc:
        is_taken = isinstance(exc, PortsExhausted) or exc.errno == errno.EADDRINUSE
        reason = f"the port is in use, choose another one with {flag}" if is_taken else exc
        raise KVConfigError(f"can't listen on {host_and_port(host, port)}: {reason}") from exc


class _Metrics:
    """The metrics server of a store, if a port is configured; clients of the store that connect
    afterwards learn its address."""

    def __init__(self, store: NodeStore, host: str, port: int | None) -> None:
        self._server = None
        if port is not None:
            with _listening(host, port, "--metrics-port"):
                self._server = MetricsServer.start(store.stats, host, port)
            found = host_and_port(host, self._server.port)
            logger.info("metrics are at http://%s/metrics", found)
            is_wildcard = ipaddress.ip_address(host).is_unspecified
            store.metrics_address = f"*:{self._server.port}" if is_wildcard else found

    def __enter__(self) -> None:
        """Nothing to do: the server is already running."""

    def __exit__(self, *_: object) -> None:
        if self._server is not None:
            self._server.close()


class _Connected:
    """A client of the store that the arguments name.

    Raises:
        KVConfigError: the store can't be reached.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args

    def __enter__(self) -> StoreClient:
        args = self._args
        LogSettings(logging.ERROR).apply()  # what a client warns of is this command's error
        secret = read_secret(args.kv_secret_file) if args.kv_secret_file else ""
        self._client = StoreClient(
            StoreAddress(args.host, args.port, secret.encode()), "mooncake-kv"
        )
        if not self._client.await_store(CONNECT_TIMEOUT_S):
            self._client.close()
            raise KVConfigError(_unreachable(self._client, args))
        return self._client

    def __exit__(self, *_: object) -> None:
        self._client.close()


def _chunk_key(text: str) -> bytes:
    try:
        key = bytes.fromhex(text)
    except ValueError:
        key = b""
    if not key:
        raise argparse.ArgumentTypeError(f"wanted a key in hexadecimal, as ls prints, got {text!r}")
    return key


def _require(found: Found | None, store: StoreClient, args: argparse.Namespace) -> Found:
    if found is None:
        raise KVConfigError(_unreachable(store, args))
    return found


def _unreachable(store: StoreClient, args: argparse.Namespace) -> str:
    reason = store.last_error or "it did not reply in time"
    if store.is_refused:
        needs_secret = isinstance(store.last_error, AccessDenied) and not args.kv_secret_file
        advice = "; no --kv-secret-file was given" if needs_secret else ""
        return f"the store at {args.host} port {args.port} rejects this command: {reason}{advice}"
    return (
        f"no store answers at {args.host} port {args.port}: start one with `mooncake-kv store`, or "
        f"give its --host, --port and --kv-secret-file ({reason})"
    )


def _printable(name: str) -> str:
    """A tenant's name without control characters: clients choose it, as their ``cache_salt``."""
    return ascii(name)[1:-1]
