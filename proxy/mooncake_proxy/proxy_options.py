"""The command line options of `mooncake-proxy`; `config_from_options.py` makes a config of them."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from mooncake_conductor.argument_parser import CommandParser, DefaultsInHelp, byte_count
from mooncake_proxy import __version__
from mooncake_proxy.config import (
    ADMISSIONS,
    FLOWS,
    POLICY_CHOICES,
    ROLE_CHANGES,
    ConductorConfig,
)
from mooncake_proxy.ops.background_stderr import LOG_FORMATS


def build_parser() -> argparse.ArgumentParser:
    """The parser of all options, in groups."""
    parser = CommandParser(
        prog="mooncake-proxy",
        usage="%(prog)s [options]",
        description="OpenAI-compatible proxy for prefill and decode instances.",
        formatter_class=DefaultsInHelp,
    )
    parser.add_argument("--version", action="version", version=__version__)
    add = parser.add_argument
    add("--host", default="127.0.0.1", metavar="HOST", help="address to listen on (:: for IPv6)")
    add(
        "--port",
        type=int,
        default=8000,
        metavar="PORT",
        help="port to listen on; 0 takes a free one",
    )
    add(
        "--admin-port",
        type=int,
        metavar="PORT",
        help="serve the live page, /metrics and /instances on this port only (default: --port)",
    )
    add("--workers", type=int, default=1, metavar="N", help="worker processes on this port")
    add(
        "--flow",
        default="pull",
        choices=FLOWS,
        help="how KV is transferred: decode instances pull it, or prefill instances push it; "
        "sglang: by pairs of SGLang, through the prefill instance's bootstrap server",
    )
    add(
        "--advertise-url",
        metavar="URL",
        help="URL of this proxy for decode instances: push, early pulls (default: --host, --port)",
    )
    for add_group in (
        _add_pools,
        _add_choice,
        _add_conductor,
        _add_health,
        _add_limits,
        _add_objectives,
        _add_access,
        _add_monitoring,
    ):
        add_group(parser)
    return parser


def _add_pools(parser: argparse.ArgumentParser) -> None:
    pools = parser.add_argument_group("instances")
    for role in ("prefill", "decode"):
        pools.add_argument(
            f"--{role}",
            action="append",
            default=[],
            metavar="[MODEL=]URL",
            help=f"URL of a {role} instance, http://HOST:PORT; repeat for each; if several models "
            "are served, preceded by the model's name and its aliases, separated by commas",
        )
    pools.add_argument(
        "--backend-url",
        action="append",
        default=[],
        metavar="[MODEL=]URL",
        help="URL of an OpenAI server that prefills and decodes whole requests",
    )
    pools.add_argument(
        "--decode-emits-first-token",
        action="store_true",
        help="decode instances repeat the first token, as vLLM does: forward theirs",
    )
    pools.add_argument(
        "--prefill-bootstrap-port",
        type=int,
        metavar="PORT",
        help="port of the prefill instances' bootstrap server, of vLLM's Mooncake connector or of "
        "SGLang (8998 there unless given)",
    )
    for flag, unit, text in (
        ("--pool-file", "FILE", "YAML or JSON list of instances, watched for changes"),
        (
            "--register-secret-file",
            "FILE",
            "let instances register themselves (--register), signed with a secret in this file: "
            "one per line, all are accepted",
        ),
        ("--kubernetes", "NAMESPACE/SELECTOR", "pods with these labels are instances; watched"),
        ("--kubernetes-api", "URL", "API server of the cluster (default: this one's)"),
    ):
        pools.add_argument(flag, metavar=unit, help=text)
    pools.add_argument(
        "--decode-recomputes",
        action="store_true",
        help='decode instances may answer stop_reason "recomputed" (vLLM-Ascend)',
    )
    pools.add_argument(
        "--short-prompt-tokens",
        type=_tokens_or_auto,
        default=0,
        metavar="TOKENS",
        help="prompts of at most this many uncached tokens go straight to a decode instance; auto: "
        "the length whose prefill there takes as long as the transfer of KV, as measured",
    )
    pools.add_argument(
        "--no-local-prefill",
        action="store_true",
        help="fail requests that no prefill instance can take; do not prefill on decode instances",
    )


def _add_choice(parser: argparse.ArgumentParser) -> None:
    choice = parser.add_argument_group("routing and retries")
    add = choice.add_argument
    add(
        "--early-pull-tokens",
        type=int,
        default=4096,
        metavar="TOKENS",
        help="pull flow: for prompts of at least this many uncached tokens, decode instances "
        "reserve blocks first and read the KV chunk by chunk while it is computed; 0: never",
    )
    add(
        "--migrate-streams",
        action="store_true",
        help="continue streams whose decode instance is lost or shuts down on another one, from "
        "the tokens so far, which are recorded from every event",
    )
    add(
        "--policy",
        default="least-loaded",
        choices=POLICY_CHOICES,
        help="routing policy for both roles; the conductor's (cost, mooncake, cache-local, "
        "lmetric, dynamo, sglang, preble) choose both instances together",
    )
    for role in ("prefill", "decode"):
        add(
            f"--{role}-policy",
            choices=POLICY_CHOICES,
            help=f"routing policy for {role} instances (default: --policy)",
        )
    add(
        "--tokenizer",
        action="append",
        default=[],
        metavar="[MODEL=]DIR",
        help="folder with the model's tokenizer.json: prefixes are compared by token ids; repeat "
        "for each of several models",
    )
    for flag, number, text in (
        ("--max-attempts", 3, "attempts per step of a request, each on another instance"),
        ("--max-running", 0, "requests served concurrently; 0: no limit"),
        ("--max-waiting", 1024, "requests that may wait in the queue; more are refused"),
    ):
        add(flag, type=int, default=number, metavar="N", help=text)
    add("--max-wait", type=float, default=30.0, metavar="SECONDS", help="longest wait in the queue")
    add(
        "--retry-ratio",
        type=float,
        default=0.2,
        metavar="SHARE",
        help="retries allowed per request, on average",
    )


def _add_conductor(parser: argparse.ArgumentParser) -> None:
    defaults = ConductorConfig()
    add = parser.add_argument_group("conductor").add_argument
    add(
        "--costs",
        action="append",
        default=[],
        metavar="[MODEL=]ROW:DEVICE:N",
        help="costs of prefills and steps until they are measured: a model and a device of "
        "mooncake-conductor's tables, and devices per instance; repeat for each of several models "
        f"(default: {defaults.costs})",
    )
    for flag, number, unit, text in (
        ("--link-gb-s", defaults.link_gb_s, "GB/S", "network bandwidth of an instance"),
        ("--kv-tokens", defaults.kv_tokens, "TOKENS", "KV capacity of an instance"),
        ("--max-batch", defaults.max_batch, "N", "sequences in the decode batch of an instance"),
    ):
        add(flag, type=type(number), default=number, metavar=unit, help=text)
    add(
        "--role-changes",
        choices=ROLE_CHANGES,
        default=defaults.role_changes,
        help="if a role is overloaded for half a minute and the other has capacity to spare: log "
        "which instance should switch its role (propose), or drain and switch it (allow)",
    )
    add(
        "--peer-proxy",
        action="append",
        default=[],
        metavar="URL",
        help="URL of a proxy on another host, with its --admin-port if it has one, that serves the "
        "same instances under the same URLs: both share their reservations; repeat for each",
    )
    add(
        "--peer-secret-file",
        metavar="FILE",
        help="file with the secret that these proxies share, which signs their messages; of "
        "several, one per line, the first signs and all are accepted",
    )
    _add_kv_events(add)


def _add_kv_events(add: Callable[..., argparse.Action]) -> None:
    add(
        "--kv-events-port",
        type=int,
        metavar="PORT",
        help="port of every instance's KV events; mooncake-engine's instances report theirs",
    )
    add(
        "--kv-events-replay-port",
        type=int,
        metavar="PORT",
        help="port of every instance at which lost KV events are replayed",
    )
    add(
        "--data-parallel-size",
        type=int,
        default=1,
        metavar="N",
        help="data-parallel ranks of every instance that does not report them (vLLM): each "
        "publishes its KV events at these ports plus its number",
    )
    add(
        "--store-kv-events",
        action="append",
        default=[],
        metavar="[MODEL=]EVENTS",
        help="KV events of a node store that instances of other engines use: tcp://HOST:PORT, and "
        "after commas tcp://HOST:PORT of the replay, and the model's namespace if the store has "
        "several models; repeat for each store; mooncake-engine's instances report theirs",
    )


def _add_health(parser: argparse.ArgumentParser) -> None:
    health = parser.add_argument_group("health")
    add = health.add_argument
    add(
        "--health-interval",
        type=float,
        metavar="SECONDS",
        help="time between health checks; 0: no checks, all instances count as up (default: 1, "
        "with --flow sglang 10)",
    )
    add(
        "--health-timeout",
        type=float,
        metavar="SECONDS",
        help="time limit of a health check (default: 2, with --flow sglang 22)",
    )
    add(
        "--health-path",
        default="/health",
        metavar="PATH",
        help="path of the health check; 200 is good",
    )
    for flag, number, text in (
        ("--health-rise", 2, "consecutive successful checks until an instance is up"),
        ("--health-fall", 3, "consecutive failed checks until an instance is down"),
        ("--eject-after", 3, "consecutive failed requests until an instance is down; 0: never"),
    ):
        add(flag, type=int, default=number, metavar="N", help=text)


def _add_limits(parser: argparse.ArgumentParser) -> None:
    limits = parser.add_argument_group("limits")
    add = limits.add_argument
    for flag, seconds, text in (
        ("--request-timeout", 3600.0, "time limit of a whole request; clients may ask for less"),
        ("--connect-timeout", 5.0, "time limit of connecting to an instance"),
        (
            "--first-byte-timeout",
            600.0,
            "time limit until an instance answers, including its prefill",
        ),
        ("--stall-timeout", 120.0, "longest silence inside a response"),
    ):
        add(flag, type=float, default=seconds, metavar="SECONDS", help=text)
    add(
        "--shutdown-timeout",
        "--drain-timeout",
        type=float,
        default=25.0,
        metavar="SECONDS",
        help="time for running requests after SIGTERM or Ctrl-C; a second signal ends them",
    )
    add(
        "--max-body-bytes",
        type=byte_count,
        default=64 * 1024 * 1024,
        metavar="BYTES",
        help="longest request body, such as 16M; a longer one is refused",
    )


def _add_access(parser: argparse.ArgumentParser) -> None:
    access = parser.add_argument_group("access")
    access.add_argument(
        "--api-key-file",
        metavar="FILE",
        help="API keys of clients, one per line; or YAML or JSON with limits, shares, models and "
        "classes of each",
    )
    access.add_argument(
        "--cache-salt-per-key",
        action="store_true",
        help="set cache_salt from the API key: clients with different keys share no prefix cache",
    )
    access.add_argument(
        "--min-priority",
        type=int,
        default=0,
        metavar="N",
        help="smallest priority value that clients may send; smaller ones are raised to it",
    )
    access.add_argument(
        "--admin-key-file", metavar="FILE", help="keys of the admin API, one per line"
    )
    access.add_argument(
        "--allowed-origins",
        default="",
        metavar="ORIGINS",
        help="origins of web pages that may use the API in a browser (CORS), separated by commas, "
        "such as https://chat.example.com; *: all",
    )
    access.add_argument("--tls-cert", metavar="FILE", help="the proxy's certificate: serve https")
    access.add_argument("--tls-key", metavar="FILE", help="the certificate's private key")
    access.add_argument("--upstream-ca", metavar="FILE", help="CA certificate of https instances")
    access.add_argument(
        "--upstream-insecure", action="store_true", help="do not verify certificates of instances"
    )


def _add_monitoring(parser: argparse.ArgumentParser) -> None:
    monitoring = parser.add_argument_group("monitoring")
    monitoring.add_argument(
        "--access-log",
        choices=("off", "errors", "all"),
        default="errors",
        help="one JSON line per request on stderr",
    )
    monitoring.add_argument(
        "--store-metrics",
        action="append",
        default=[],
        metavar="URL",
        help="where a node store serves its metrics (http://10.0.0.1:7702), which /metrics/targets "
        "names to Prometheus; repeat for each that no instance of ours connects to",
    )
    monitoring.add_argument(
        "--otlp-endpoint",
        metavar="URL",
        help="export OpenTelemetry spans to this collector, as OTLP over HTTP (http://collector:4318)",
    )
    monitoring.add_argument(
        "--log-level",
        default="info",
        choices=("debug", "info", "warning", "error"),
        help="lowest level of log lines on stderr",
    )
    monitoring.add_argument(
        "--log-format",
        default="text",
        choices=LOG_FORMATS,
        help="format of log lines on stderr: text, or one JSON object per line",
    )


def _add_objectives(parser: argparse.ArgumentParser) -> None:
    objectives = parser.add_argument_group("objectives and admission")
    for name, text in (
        ("ttft", "time to first token"),
        ("tbt", "time between tokens, for nine in ten of a stream's gaps"),
    ):
        objectives.add_argument(
            f"--slo-{name}",
            metavar="MS",
            help=f"objective for metrics and admission: {text}; for admission also a multiple of "
            "the request's unloaded latency, such as 5x",
        )
    objectives.add_argument(
        "--request-class",
        action="append",
        default=[],
        metavar="NAME:ttft=MS,tbt=MS,best-effort",
        help="objectives of requests whose X-Request-Class header or API key names it; best-effort "
        "ones are refused more often as the load approaches the objectives; repeat for each",
    )
    objectives.add_argument(
        "--admission",
        choices=ADMISSIONS,
        default="none",
        help="refuse requests that would miss their objectives with 429: by the prefill load at "
        "arrival and the decode load after the prefill (baseline), by both at arrival (early), or "
        "at arrival by the decode load expected at the end of the prefill (predictive)",
    )


def _tokens_or_auto(text: str) -> int | None:
    if text == "auto":
        return None
    try:
        return int(text)
    except ValueError:
        wanted = "wanted a number of tokens, or auto"
        raise argparse.ArgumentTypeError(f"{wanted}, found {text!r}") from None
