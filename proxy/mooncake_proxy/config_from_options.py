"""Builds the proxy's configuration from the parsed options of `proxy_options.py`."""

from __future__ import annotations

import argparse
import logging
from dataclasses import replace
from pathlib import Path

from mooncake_api.instance_protocol import split_origins
from mooncake_proxy.api.api_keys import KeyFile, read_key_file, read_keys
from mooncake_proxy.config import (
    CONDUCTOR_POLICIES,
    AdmissionConfig,
    ConductorConfig,
    KeyFiles,
    ProxyConfig,
    RequestClass,
    TlsConfig,
)
from mooncake_proxy.errors import ConfigError
from mooncake_proxy.http1.http_wire import MAX_PORT, Origin
from mooncake_proxy.http1.server_connection import ServerLimits
from mooncake_proxy.http1.upstream_connection import ClientLimits
from mooncake_proxy.ops.reloaded_files import classes_of, stamps_of
from mooncake_proxy.pool.dp_ranks import MAX_DP_RANKS
from mooncake_proxy.pool.health_checks import SGLANG_HEALTH, HealthConfig
from mooncake_proxy.pool.instance_reports import KVEventEndpoints
from mooncake_proxy.pool.instances import InstanceSpec, Role, is_loopback
from mooncake_proxy.pool.membership import InstanceDefaults, parse_store_events

# Length of the shortest secret that is accepted, as by instances. Messages are signed with it, so
# whoever has recorded one can try guesses of the secret at home, as fast as their machines can.
MIN_SECRET_BYTES = 16

logger = logging.getLogger(__name__)


def config_from(args: argparse.Namespace) -> ProxyConfig:
    """Build the configuration. Raises ConfigError, which names the invalid option."""
    # Before they are read: what is written meanwhile is read again.
    stamps = stamps_of(args.api_key_file, args.admin_key_file)
    key_file = read_key_file(args.api_key_file)
    defaults = _instance_defaults(args)
    return ProxyConfig(
        host=args.host,
        port=args.port,
        admin_port=args.admin_port,
        workers=args.workers,
        flow=args.flow,
        advertise_url=args.advertise_url,
        instances=_instances(args, defaults),
        instance_defaults=defaults,
        prefill_policy=args.prefill_policy or args.policy,
        decode_policy=args.decode_policy or args.policy,
        tokenizers=_by_model("--tokenizer", args.tokenizer),
        api_keys=key_file.accepted,
        tenants=key_file.tenants,
        admin_keys=read_keys(args.admin_key_file),
        key_files=KeyFiles(args.api_key_file, args.admin_key_file, stamps),
        allowed_origins=split_origins(args.allowed_origins),
        min_priority=args.min_priority,
        cache_salt_per_key=args.cache_salt_per_key,
        slo_ttft_s=_in_seconds("--slo-ttft", args.slo_ttft),
        slo_tbt_s=_in_seconds("--slo-tbt", args.slo_tbt),
        pool_file=args.pool_file,
        kubernetes=args.kubernetes,
        kubernetes_api=args.kubernetes_api,
        register_secret=_read_secret("--register-secret-file", args.register_secret_file),
        local_prefill=not args.no_local_prefill,
        migrates_streams=args.migrate_streams,
        short_prompt_tokens=args.short_prompt_tokens,
        early_pull_tokens=args.early_pull_tokens,
        max_attempts=args.max_attempts,
        retry_ratio=args.retry_ratio,
        eject_after=args.eject_after,
        request_timeout_s=args.request_timeout,
        shutdown_timeout_s=args.shutdown_timeout,
        access_log=args.access_log,
        store_metrics=tuple(Origin.parse(url) for url in args.store_metrics),
        otlp_endpoint=args.otlp_endpoint,
        server=ServerLimits(max_body_bytes=args.max_body_bytes),
        client=ClientLimits(args.connect_timeout, args.first_byte_timeout, args.stall_timeout),
        health=_health(args),
        admission=AdmissionConfig(args.max_running, args.max_waiting, args.max_wait),
        conductor=_conductor_from(args, key_file),
        tls=TlsConfig(args.tls_cert, args.tls_key, args.upstream_ca, not args.upstream_insecure),
    )


def _health(args: argparse.Namespace) -> HealthConfig:
    """The health checks, at the pace that the engine of the flow allows if none is given."""
    paced = SGLANG_HEALTH if args.flow == "sglang" else HealthConfig()
    return HealthConfig(
        paced.interval_s if args.health_interval is None else args.health_interval,
        paced.timeout_s if args.health_timeout is None else args.health_timeout,
        args.health_path,
        args.health_rise,
        args.health_fall,
    )


def _conductor_from(args: argparse.Namespace, key_file: KeyFile) -> ConductorConfig | None:
    """The conductor's configuration; None if the proxy's own policies choose instances."""
    policy = args.prefill_policy or args.policy
    if policy not in CONDUCTOR_POLICIES and args.admission == "none":
        role_changes = args.role_changes != "off"
        needing = (
            ("--request-class", args.request_class),
            ("--role-changes", role_changes),
            ("--peer-proxy", args.peer_proxy),
        )
        for flag, given in (*needing, *_multiples(args)):
            if given:
                raise ConfigError(f"{flag}: wanted --admission or a policy of the conductor")
        return None
    costs = _by_model("--costs", args.costs)
    return ConductorConfig(
        policy=policy,
        admission=args.admission,
        default_class=RequestClass("default", args.slo_ttft or "inf", args.slo_tbt or "inf"),
        classes=_classes(args.request_class, key_file),
        costs=costs.pop("", ConductorConfig().costs),
        model_costs=costs,
        binds_late=args.flow == "pull",
        link_gb_s=args.link_gb_s,
        kv_tokens=args.kv_tokens,
        max_batch=args.max_batch,
        role_changes=args.role_changes,
        peers=tuple(str(Origin.parse(url)) for url in args.peer_proxy),
        peer_secret=_read_secret("--peer-secret-file", args.peer_secret_file),
    )


def _read_secret(flag: str, path: str | None) -> str:
    """Read secrets from a file, one per line, of which the first signs and all are accepted.

    Empty if `path` is None. Raises ConfigError if there is none, or if one is too short.
    """
    if path is None:
        return ""
    try:
        lines = [line.strip() for line in Path(path).read_text("utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"{flag} {path}: {exc}") from exc
    found = [line for line in lines if line]
    if not found:
        raise ConfigError(f"{flag} {path} is empty: wanted the secret that is shared")
    if (length := min(len(line.encode()) for line in found)) < MIN_SECRET_BYTES:
        raise ConfigError(
            f"{flag} {path} holds a secret of {length} bytes, which can be guessed: wanted at "
            f"least {MIN_SECRET_BYTES}; openssl rand -hex 32 makes one"
        )
    return "\n".join(found)


def _classes(given: list[str], key_file: KeyFile) -> tuple[RequestClass, ...]:
    """Request classes from options and from the keys file."""
    classes = [RequestClass.parse(text) for text in given]
    classes += classes_of(key_file)
    names = [each.name for each in classes]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ConfigError(f"class {', '.join(sorted(twice))}: declared twice")
    return tuple(classes)


def _multiples(args: argparse.Namespace) -> list[tuple[str, str]]:
    given = (("--slo-ttft", args.slo_ttft), ("--slo-tbt", args.slo_tbt))
    return [(flag, text) for flag, text in given if text and text.endswith("x")]


def _by_model(flag: str, given: list[str]) -> dict[str, str]:
    """Parse `MODEL=VALUE` options; a plain value is for instances without a model name."""
    found: dict[str, str] = {}
    for text in given:
        model, equals, value = text.rpartition("=")
        if not value or (equals and not model):
            raise ConfigError(f"{flag} {text!r}: wanted VALUE or MODEL=VALUE")
        if model in found:
            raise ConfigError(f"{flag}: given twice for {model or 'instances without a model'}")
        found[model] = value
    return found


def _named_url(flag: str, text: str) -> tuple[tuple[str, ...], Origin]:
    """Parse `MODEL,ALIAS=URL` or a plain URL."""
    before, equals, url = text.partition("=") if "=http" in text else ("", "", text)
    names = tuple(name.strip() for name in before.split(",")) if equals else ()
    if not all(names):
        raise ConfigError(f"{flag} {text!r}: wanted URL, MODEL=URL or MODEL,ALIAS=URL")
    return names, Origin.parse(url)


def _in_seconds(flag: str, text: str | None) -> float | None:
    """Convert milliseconds to seconds; None for a multiple, which depends on the request."""
    if text is None or text.endswith("x"):
        return None
    try:
        return float(text) / 1000
    except ValueError:
        raise ConfigError(f"{flag} {text!r}: wanted milliseconds, or a multiple as 5x") from None


def _may_grow(config: ProxyConfig) -> bool:
    sources = (config.pool_file, config.kubernetes, config.admin_keys, config.register_secret)
    return any(sources)


def check_can_serve(config: ProxyConfig) -> None:
    """Raise ConfigError if there are no decode instances and none can be added later."""
    if not _may_grow(config) and all(spec.role is Role.PREFILL for spec in config.instances):
        raise ConfigError(
            "no instance to decode, now or later: give --prefill URL and --decode URL, or "
            "--backend-url URL, or --pool-file or --kubernetes to follow instances, or "
            "--admin-key-file or --register-secret-file to add them over HTTP"
        )


def warn_if_open(config: ProxyConfig) -> None:
    """Log a warning if other machines may send requests without a key."""
    if not config.api_keys and not is_loopback(config.host):
        logger.warning(
            "--host %s without --api-key-file: whoever reaches port %d can send requests; give "
            "--api-key-file, or let only a gateway that checks keys reach it",
            config.host or "''",
            config.port,
        )


def warn_if_early_pulls_are_off(config: ProxyConfig) -> None:
    """Log a warning if pairs can't pull early, because they don't know this proxy's address."""
    if config.flow != "pull" or not config.early_pull_tokens or config.is_reachable:
        return
    # Those that emit the first token themselves are of other engines, which pull no prompt early.
    decodes = [spec for spec in config.instances if spec.role is Role.DECODE]
    if _may_grow(config) or not all(spec.emits_first_token for spec in decodes):
        logger.warning(
            "--host %s without --advertise-url: early pulls are off, and the KV of long prompts "
            "moves only once they are computed; give --advertise-url http://THIS_HOST:%d, where "
            "decode instances reach this proxy (--early-pull-tokens 0 if none is wanted)",
            config.host or "''",
            config.port,
        )


def _instance_defaults(args: argparse.Namespace) -> InstanceDefaults:
    size = args.data_parallel_size
    for flag, number, most in (
        ("--data-parallel-size", size, MAX_DP_RANKS),
        ("--prefill-bootstrap-port", args.prefill_bootstrap_port, MAX_PORT),
        ("--kv-events-port", args.kv_events_port, MAX_PORT - size + 1),
        ("--kv-events-replay-port", args.kv_events_replay_port, MAX_PORT - size + 1),
    ):
        if number is not None and not 1 <= number <= most:
            raise ConfigError(f"{flag} {number}: wanted 1 to {most}")
    return InstanceDefaults(
        args.decode_emits_first_token,
        args.decode_recomputes,
        args.prefill_bootstrap_port,
        args.kv_events_port,
        args.kv_events_replay_port,
        size,
    )


def _instances(args: argparse.Namespace, defaults: InstanceDefaults) -> tuple[InstanceSpec, ...]:
    given = [
        (Role.PREFILL, "--prefill", args.prefill),
        (Role.DECODE, "--decode", args.decode),
        (Role.BOTH, "--backend-url", args.backend_url),
    ]
    stores = _store_events(args.store_kv_events)
    specs = []
    for role, flag, urls in given:
        for text in urls:
            names, origin = _named_url(flag, text)
            own_stores = stores.get("".join(names[:1]), stores.get("", ()))
            spec = defaults.spec(origin, role, "flags", names)
            specs.append(replace(spec, store_kv_events=own_stores))
    return tuple(specs)


def _store_events(given: list[str]) -> dict[str, tuple[KVEventEndpoints, ...]]:
    """KV events of node stores by model; the name is empty for models without their own."""
    found: dict[str, tuple[KVEventEndpoints, ...]] = {}
    for text in given:
        model, _, endpoints = text.rpartition("=")
        try:
            parsed = parse_store_events(endpoints if model else text)
        except ConfigError as exc:
            raise ConfigError(f"--store-kv-events: {exc}") from exc
        found[model] = (*found.get(model, ()), parsed)
    return found
