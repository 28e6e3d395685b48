"""`mooncake-proxy`: flags to configuration, signals to a clean stop."""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import uvloop

from mooncake_proxy import __version__
from mooncake_proxy.app import Application
from mooncake_proxy.command_help import DefaultsInHelp
from mooncake_proxy.config import AdmissionConfig, ProxyConfig, TlsConfig
from mooncake_proxy.errors import ConfigError
from mooncake_proxy.health import HealthConfig
from mooncake_proxy.http1.connection import ClientLimits
from mooncake_proxy.http1.origin import Origin
from mooncake_proxy.http1.server import ServerLimits
from mooncake_proxy.instances import InstanceSpec, Role
from mooncake_proxy.policy import POLICIES
from mooncake_proxy.share import Share
from mooncake_proxy.stopping import Stop
from mooncake_proxy.timing import timeout
from mooncake_proxy.workers import Parent

log = logging.getLogger(__name__)


def build_parser() -> argparse.ArgumentParser:
    """All flags, in the groups they belong to."""
    parser = argparse.ArgumentParser(
        prog="mooncake-proxy",
        description="OpenAI-compatible front of prefill and decode instances.",
        formatter_class=DefaultsInHelp,
    )
    parser.add_argument("--version", action="version", version=__version__)
    add = parser.add_argument
    add("--host", default="127.0.0.1", metavar="HOST", help="address to listen on (:: for IPv6)")
    add("--port", type=int, default=8000, metavar="PORT", help="0 takes a free one")
    add("--workers", type=int, default=1, metavar="N", help="processes on this port")
    add(
        "--flow",
        default="pull",
        choices=("pull", "push"),
        help="who moves KV: decode instances pull it, or prefill instances push it",
    )
    add(
        "--advertise-url",
        metavar="URL",
        help="how decode instances reach this proxy in the push flow (default: --host, --port)",
    )
    for add_group in (_add_pools, _add_choice, _add_health, _add_limits, _add_access):
        add_group(parser)
    return parser


def _add_pools(parser: argparse.ArgumentParser) -> None:
    pools = parser.add_argument_group("instances")
    for role in ("prefill", "decode"):
        pools.add_argument(
            f"--{role}",
            action="append",
            default=[],
            metavar="URL",
            help=f"a {role} instance, http://HOST:PORT; repeat for each",
        )
    pools.add_argument(
        "--backend-url",
        action="append",
        default=[],
        metavar="URL",
        help="an OpenAI server that prefills and decodes by itself",
    )
    pools.add_argument(
        "--decode-emits-first-token",
        action="store_true",
        help="decode instances send the first token again (vLLM): forward theirs, not P's",
    )
    pools.add_argument(
        "--prefill-bootstrap-port",
        type=int,
        metavar="PORT",
        help="of prefill instances with vLLM's own Mooncake connector: its bootstrap server",
    )
    pools.add_argument("--pool-file", metavar="FILE", help="YAML or JSON; changes are followed")
    pools.add_argument("--kubernetes", metavar="NAMESPACE/SELECTOR", help="follow labelled pods")
    pools.add_argument(
        "--kubernetes-api", metavar="URL", help="of the cluster (default: this one's)"
    )
    pools.add_argument(
        "--decode-recomputes",
        action="store_true",
        help='decode instances may answer stop_reason "recomputed" (vLLM-Ascend)',
    )
    pools.add_argument(
        "--no-local-prefill",
        action="store_true",
        help="fail instead of letting a decode instance prefill when no prefill instance can",
    )


def _add_choice(parser: argparse.ArgumentParser) -> None:
    choice = parser.add_argument_group("choice and retries")
    add = choice.add_argument
    add("--policy", default="least-loaded", choices=tuple(POLICIES), help="for both roles")
    for role in ("prefill", "decode"):
        add(
            f"--{role}-policy",
            choices=tuple(POLICIES),
            help=f"for {role} instances (default: --policy)",
        )
    add("--tokenizer", metavar="DIR", help="the model's folder: prefix policy by token ids")
    for flag, number, text in (
        ("--max-attempts", 3, "per step, on one instance each"),
        ("--max-running", 0, "requests at once; 0: no bound"),
        ("--max-waiting", 1024, "requests that wait for a place; more are refused"),
    ):
        add(flag, type=int, default=number, metavar="N", help=text)
    add("--max-wait", type=float, default=30.0, metavar="SECONDS", help="for a place")
    add("--retry-ratio", type=float, default=0.2, metavar="SHARE", help="retries per request")


def _add_health(parser: argparse.ArgumentParser) -> None:
    health = parser.add_argument_group("health")
    add = health.add_argument
    for flag, seconds, text in (
        ("--health-interval", 1.0, "between checks; 0: none, all instances count as up"),
        ("--health-timeout", 2.0, "for the answer to a check"),
    ):
        add(flag, type=float, default=seconds, metavar="SECONDS", help=text)
    add("--health-path", default="/health", metavar="PATH", help="asked for, answers 200")
    for flag, number, text in (
        ("--health-rise", 2, "good checks in a row until an instance is up"),
        ("--health-fall", 3, "bad checks in a row until it is down"),
        ("--eject-after", 3, "failed requests in a row until it is down; 0: never"),
    ):
        add(flag, type=int, default=number, metavar="N", help=text)


def _add_limits(parser: argparse.ArgumentParser) -> None:
    limits = parser.add_argument_group("limits")
    add = limits.add_argument
    for flag, seconds, text in (
        ("--request-timeout", 3600.0, "for a whole request; clients may ask for less"),
        ("--connect-timeout", 5.0, "for a connection to an instance"),
        ("--first-byte-timeout", 600.0, "until an instance answers, its prefill included"),
        ("--stall-timeout", 120.0, "between two pieces of an answer"),
    ):
        add(flag, type=float, default=seconds, metavar="SECONDS", help=text)
    add(
        "--shutdown-timeout",
        "--drain-timeout",
        type=float,
        default=25.0,
        metavar="SECONDS",
        help="how long answers may go on after SIGTERM or Ctrl-C; a second one ends at once",
    )
    add(
        "--max-body-bytes",
        type=int,
        default=64 * 1024 * 1024,
        metavar="BYTES",
        help="of a request; a longer one is refused",
    )


def _add_access(parser: argparse.ArgumentParser) -> None:
    access = parser.add_argument_group("access")
    access.add_argument(
        "--api-key-file", metavar="FILE", help="one key per line; who asks needs one"
    )
    access.add_argument("--admin-key-file", metavar="FILE", help="keys that may change instances")
    access.add_argument("--tls-cert", metavar="FILE", help="the proxy's certificate: https")
    access.add_argument("--tls-key", metavar="FILE", help="its key")
    access.add_argument("--upstream-ca", metavar="FILE", help="authority of https instances")
    access.add_argument("--upstream-insecure", action="store_true", help="don't verify them")
    access.add_argument(
        "--access-log",
        choices=("off", "errors", "all"),
        default="errors",
        help="a line of JSON per request on stderr",
    )
    access.add_argument(
        "--otlp-endpoint",
        metavar="URL",
        help="send OpenTelemetry spans there, as OTLP over HTTP (http://collector:4318)",
    )
    access.add_argument(
        "--log-level",
        default="info",
        choices=("debug", "info", "warning", "error"),
        help="least severe lines on stderr",
    )


def config_from(args: argparse.Namespace) -> ProxyConfig:
    """The configuration that the flags describe; ConfigError names the bad one."""
    return ProxyConfig(
        host=args.host,
        port=args.port,
        workers=args.workers,
        flow=args.flow,
        advertise_url=args.advertise_url,
        instances=_instances(args),
        prefill_policy=args.prefill_policy or args.policy,
        decode_policy=args.decode_policy or args.policy,
        tokenizer=args.tokenizer,
        api_keys=read_keys(args.api_key_file),
        admin_keys=read_keys(args.admin_key_file),
        pool_file=args.pool_file,
        kubernetes=args.kubernetes,
        kubernetes_api=args.kubernetes_api,
        local_prefill=not args.no_local_prefill,
        max_attempts=args.max_attempts,
        retry_ratio=args.retry_ratio,
        eject_after=args.eject_after,
        request_timeout_s=args.request_timeout,
        shutdown_timeout_s=args.shutdown_timeout,
        access_log=args.access_log,
        otlp_endpoint=args.otlp_endpoint,
        server=ServerLimits(max_body_bytes=args.max_body_bytes),
        client=ClientLimits(args.connect_timeout, args.first_byte_timeout, args.stall_timeout),
        health=HealthConfig(
            args.health_interval,
            args.health_timeout,
            args.health_path,
            args.health_rise,
            args.health_fall,
        ),
        admission=AdmissionConfig(args.max_running, args.max_waiting, args.max_wait),
        tls=TlsConfig(args.tls_cert, args.tls_key, args.upstream_ca, not args.upstream_insecure),
    )


def check_can_serve(config: ProxyConfig) -> None:
    """ConfigError for a proxy that has nobody to decode, and can't be told of anybody."""
    may_grow = config.pool_file or config.kubernetes or config.admin_keys
    if not may_grow and all(spec.role is Role.PREFILL for spec in config.instances):
        raise ConfigError(
            "no instance to decode, now or later: give --prefill URL and --decode URL, or "
            "--backend-url URL, or --pool-file or --kubernetes to follow instances, or "
            "--admin-key-file to add them over HTTP"
        )


def _instances(args: argparse.Namespace) -> tuple[InstanceSpec, ...]:
    given = [
        (Role.PREFILL, args.prefill),
        (Role.DECODE, args.decode),
        (Role.BOTH, args.backend_url),
    ]
    return tuple(
        InstanceSpec(
            Origin.parse(url),
            role,
            emits_first_token=role is Role.DECODE and args.decode_emits_first_token,
            recomputes=role is Role.DECODE and args.decode_recomputes,
            bootstrap_port=args.prefill_bootstrap_port if role is Role.PREFILL else None,
        )
        for role, urls in given
        for url in urls
    )


def read_keys(path: str | None) -> frozenset[str]:
    """Keys of a file, one per line; empty lines and `#` comments are skipped."""
    if path is None:
        return frozenset()
    try:
        lines = Path(path).read_text("utf-8").splitlines()
    except OSError as exc:
        raise ConfigError(f"key file {path}: {exc.strerror}; wanted one key per line") from exc
    keys = frozenset(line.strip() for line in lines if line.strip() and not line.startswith("#"))
    if not keys:
        raise ConfigError(f"key file {path} holds no key: it would lock everybody out")
    return keys


async def serve(config: ProxyConfig, share: Share | None = None) -> None:
    """Run until SIGINT or SIGTERM, then drain, which a second one ends.

    `share` where this is one of several workers.
    """
    app = Application(config, share)
    stop = Stop()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, lambda: stop.signal(loop.time()))
    try:
        await app.start()
    except OSError as exc:
        raise ConfigError(f"can't listen on {config.host}:{config.port}: {exc}") from exc
    host = f"[{config.host}]" if ":" in config.host else config.host
    scheme = "https" if config.tls.certificate else "http"
    # What was loaded so far stays: the collector need not look at it again and again.
    gc.collect()
    gc.freeze()
    _announce(f"mooncake-proxy listens on {scheme}://{host}:{app.port}")
    try:
        while not stop.asked.is_set():
            app.poll()
            with suppress(asyncio.TimeoutError):
                async with timeout(1.0):
                    await stop.asked.wait()
    finally:
        await app.close(stop)


def _announce(line: str) -> None:
    """Tell whoever started us; that the disk under standard output is full keeps nobody from
    being served."""
    try:
        print(line, flush=True)
    except OSError as exc:
        log.warning("can't write to standard output: %s", exc)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # it is flushed again at the end


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point. 2 for a configuration that can't be used."""
    args = build_parser().parse_args(argv)
    logging.basicConfig(
        level=args.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    try:
        config = config_from(args)
        check_can_serve(config)
        if config.workers > 1:
            return Parent(config, lambda own, share: uvloop.run(serve(own, share))).run()
        uvloop.run(serve(config))
    except ConfigError as exc:
        print(f"mooncake-proxy: {exc}", file=sys.stderr)
        return 2
    return 0
