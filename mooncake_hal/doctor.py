"""``mooncake-hal doctor``: is this deployment going to work, and if a peer can't be reached, where.

Reads the plan of a deployment from ``--instance`` flags or a JSON file, checks it with the same
rules that instances check at start and in the handshake, and tries every port of a live peer. What
this host has for a transport is looked at one thing after the other.
"""

from __future__ import annotations

import argparse
import base64
import json
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from mooncake_hal.deployment import (
    DeploymentPlan,
    Hardware,
    InstanceInfo,
    InstancePlan,
    default_block_size,
)
from mooncake_hal.errors import DeploymentRefused, HalError
from mooncake_hal.negotiation import Transports, offered_transports, reserved_ports
from mooncake_hal.ports import Port
from mooncake_hal.registry import Registry
from mooncake_hal.specs import Check
from mooncake_hal.transport import EndpointOptions

TRY_TIMEOUT_S = 5.0
FIELDS = ("name", "role", "host", "connector", "backend", "tp", "pp", "block_size", "http", "kv")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line of ``mooncake-hal doctor``."""
    parser.add_argument(
        "--instance",
        action="append",
        type=_from_flag,
        default=[],
        metavar="KEY=VALUE,...",
        help=f"an instance to be started here; keys: {', '.join(FIELDS)} "
        "(default: role=both,host=127.0.0.1,backend=auto,tp=1,pp=1)",
    )
    parser.add_argument(
        "--file",
        type=Path,
        metavar="FILE",
        help='JSON: {"instances": [{KEY: VALUE, ...}, ...]}; as many --instance',
    )
    parser.add_argument(
        "--peer", action="append", default=[], metavar="URL", help="a live instance to reach"
    )
    parser.add_argument(
        "--transport", action="append", default=[], metavar="NAME", help="what this host has for it"
    )
    parser.add_argument(
        "--secret-file", type=Path, metavar="FILE", help="the deployment's secret, for --peer"
    )


def run(options: argparse.Namespace) -> int:
    """Check everything asked for; the status is 0 if all is in order.

    Raises:
        DeploymentRefused: a file that can't be read.
    """
    checks = []
    plans = [*options.instance, *_from_file(options.file)]
    secret = _secret(options.secret_file)
    registry = Registry.discover()
    if plans:
        checks += examine_plan(registry, plans)
    for name in options.transport:
        checks += examine_transport(registry, name)
    for url in options.peer:
        checks += examine_peer(registry, url, secret)
    if not checks:
        checks = [
            Check("arguments", "nothing to check: give --instance, --file, --transport or --peer")
        ]
    for check in checks:
        print(check)  # noqa: T201  # the command's output
    return int(any(check.problem for check in checks))


def examine_plan(registry: Registry, plans: list[dict[str, Any]]) -> list[Check]:
    """Check a planned deployment: rules, connectors, ports."""
    try:
        deployment = DeploymentPlan(tuple(_plan(raw, registry) for raw in plans))
        deployment.validate()
    except DeploymentRefused as exc:
        return [Check("deployment", problem) for problem in exc.problems]
    except HalError as exc:
        return [Check("deployment", str(exc))]
    names = ", ".join(f"{plan.name} ({plan.role})" for plan in deployment.instances)
    return [Check(f"deployment of {names}: roles, connectors, ports, sizes, hardware")]


def examine_transport(registry: Registry, name: str) -> list[Check]:
    """Look at this host for what a transport needs."""
    if name not in registry.transports:
        known = ", ".join(sorted(registry.transports))
        return [Check(f"transport {name}", f"no installed plugin offers it; there are {known}")]
    spec, _ = registry.transports[name]
    found = spec.probe()
    if not found.ok:
        first = Check(f"transport {name}", found.reason)
    else:
        first = Check(f"transport {name}: {found.reason}")
    return [first, *spec.examine()]


def examine_peer(registry: Registry, url: str, secret: bytes) -> list[Check]:
    """Try the ports of a live instance, from its HTTP port to every rank's transports."""
    try:
        topology = _fetch(f"{url.rstrip('/')}/kv/topology")
    except (OSError, ValueError) as exc:
        return [Check(f"HTTP of {url}", str(exc))]
    checks = [Check(f"HTTP of {url}")]
    host, port = topology["host"], topology["port"]
    side_channel, problem = f"KV side channel {host}:{port}", None
    try:
        socket.create_connection((host, port), TRY_TIMEOUT_S).close()
    except OSError as exc:
        problem = f"can't be reached: {exc}; is the port open between the hosts?"
    checks.append(Check(side_channel, problem))
    checks += _try_ranks(registry, topology["ranks"], host, secret)
    return checks


def _fetch(url: str) -> dict[str, Any]:
    try:
        with closing(urllib.request.urlopen(url, timeout=TRY_TIMEOUT_S)) as answer:
            return dict(json.load(answer))
    except urllib.error.HTTPError as exc:
        raise OSError(f"{url} answered {exc.code}: it has no KV connector, or is not ours") from exc
    except urllib.error.URLError as exc:
        raise OSError(f"{url} can't be reached: {exc.reason}") from exc


def _try_ranks(
    registry: Registry, ranks: list[dict[str, Any]], host: str, secret: bytes
) -> Iterator[Check]:
    for rank, published in enumerate(ranks):
        for name, encoded in published["endpoints"].items():
            what = f"rank {rank} over {name}"
            address = base64.b64decode(encoded)
            try:
                # It holds no memory, and is gone at once: where there is no secret, none is wanted.
                options = EndpointOptions(
                    host=_own_address(host), secret=secret, allow_no_secret=True
                )
                with closing(Transports.open(registry, options, wanted=name)) as transports:
                    transports.connect({name: address}, timeout=TRY_TIMEOUT_S).peer.close()
            except (HalError, OSError) as exc:
                yield Check(what, str(exc))
            else:
                yield Check(what)


def _own_address(host: str) -> str:
    """The address of this machine that faces the peer; nothing is sent."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        return str(probe.getsockname()[0])


def _from_flag(text: str) -> dict[str, Any]:
    pairs = [item.partition("=") for item in text.split(",")]
    if not all(sign for _, sign, _ in pairs):
        raise argparse.ArgumentTypeError(
            f"wanted KEY=VALUE,... such as role=prefill,tp=2, got {text!r}"
        )
    return {key.strip().replace("-", "_"): value.strip() for key, _, value in pairs}


def _from_file(path: Path | None) -> list[dict[str, Any]]:
    if path is None:
        return []
    try:
        instances = json.loads(path.read_text())["instances"]
        return [dict(instance) for instance in instances]
    except OSError as exc:
        raise DeploymentRefused([f"can't read --file: {exc}"]) from exc
    except (ValueError, TypeError, KeyError) as exc:
        raise DeploymentRefused(
            [
                f'--file {path}: wanted JSON such as {{"instances": [{{"role": "prefill"}}]}}, got '
                f"another form ({type(exc).__name__}: {exc})"
            ]
        ) from exc


def _secret(path: Path | None) -> bytes:
    if path is None:
        return b""
    try:
        return path.read_bytes().strip()
    except OSError as exc:
        raise DeploymentRefused([f"can't read --secret-file: {exc}"]) from exc


def _plan(raw: dict[str, Any], registry: Registry) -> InstancePlan:
    unknown = sorted(set(raw) - set(FIELDS))
    if unknown:
        raise DeploymentRefused([f"unknown keys {unknown}; known are {list(FIELDS)}"])
    role = raw.get("role", "both")
    host = raw.get("host", "127.0.0.1")
    default_connector = "" if role == "both" else "MooncakeConnector"
    wanted = (("HTTP", raw.get("http")), ("KV side channel", raw.get("kv")))
    ports = tuple(Port(what, host, _number(what, number)) for what, number in wanted if number)
    connector = raw.get("connector", default_connector)
    backend = registry.select_backend(raw.get("backend", "auto"))
    capabilities = backend.capabilities
    generation = backend.runtime.devices()[0].generation
    hardware = Hardware(backend.name, generation)
    block_size = raw.get("block_size", default_block_size(capabilities).tokens)
    reserved = reserved_ports(registry, allowed=capabilities.transports) if connector else ()
    return InstancePlan(
        raw.get("name", role),
        role,
        connector,
        ports,
        InstanceInfo(
            hardware,
            tp_size=_number("tp", raw.get("tp", 1)),
            block_size=_number("block_size", block_size),
            pp_size=_number("pp", raw.get("pp", 1)),
            transports=offered_transports(registry, allowed=capabilities.transports),
        ),
        tuple(reserved),
    )


def _number(what: str, given: Any) -> int:
    try:
        return int(given)
    except (ValueError, TypeError) as exc:
        raise DeploymentRefused([f"{what}: wanted a number, got {given!r}"]) from exc
