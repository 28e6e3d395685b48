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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mooncake_hal.backend import Backend
from mooncake_hal.deployment import (
    Deployment,
    Hardware,
    InstancePlan,
    PairFacts,
    default_block_size,
)
from mooncake_hal.errors import DeploymentRefused, HalError
from mooncake_hal.negotiation import Transports, reserved_ports
from mooncake_hal.ports import Port
from mooncake_hal.registry import Registry
from mooncake_hal.transport import EndpointOptions

TRY_TIMEOUT_S = 5.0
FIELDS = ("name", "role", "host", "connector", "backend", "tp", "pp", "block_size", "http", "kv")


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was checked.

    Args:
        what: was checked.
        problem: None if it is in order.
    """

    what: str
    problem: str | None = None

    def __str__(self) -> str:
        return (
            f"ok    {self.what}" if self.problem is None else f"FAIL  {self.what}: {self.problem}"
        )


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
    findings = []
    plans = [*options.instance, *_from_file(options.file)]
    secret = _secret(options.secret_file)
    if plans:
        findings += examine_plan(plans)
    for name in options.transport:
        findings += examine_transport(name)
    for url in options.peer:
        findings += examine_peer(url, secret)
    if not findings:
        findings = [
            Finding("arguments", "nothing to check: give --instance, --file, --transport or --peer")
        ]
    for finding in findings:
        print(finding)  # noqa: T201  # the command's output
    return int(any(finding.problem for finding in findings))


def examine_plan(plans: list[dict[str, Any]]) -> list[Finding]:
    """Check a planned deployment: rules, connectors, ports."""
    registry = Registry.discover()
    try:
        deployment = Deployment(tuple(_plan(raw, registry) for raw in plans))
        deployment.validate()
    except DeploymentRefused as exc:
        return [Finding("deployment", problem) for problem in exc.problems]
    except HalError as exc:
        return [Finding("deployment", str(exc))]
    names = ", ".join(f"{plan.name} ({plan.role})" for plan in deployment.instances)
    return [Finding(f"deployment of {names}: roles, connectors, ports, sizes, hardware")]


def examine_transport(name: str) -> list[Finding]:
    """Look at this host for what a transport needs."""
    registry = Registry.discover()
    if name not in registry.transports:
        known = ", ".join(sorted(registry.transports))
        return [Finding(f"transport {name}", f"no installed plugin offers it; there are {known}")]
    spec, _ = registry.transports[name]
    found = spec.probe()
    if not found.ok:
        first = Finding(f"transport {name}", found.reason)
    else:
        first = Finding(f"transport {name}: {found.reason}")
    return [first, *(Finding(check.what, check.problem) for check in spec.examine())]


def examine_peer(url: str, secret: bytes) -> list[Finding]:
    """Try the ports of a live instance, from its HTTP port to every rank's transports."""
    try:
        topology = _fetch(f"{url.rstrip('/')}/kv/topology")
    except (OSError, ValueError) as exc:
        return [Finding(f"HTTP of {url}", str(exc))]
    findings = [Finding(f"HTTP of {url}")]
    findings.append(_try_control(topology["host"], topology["port"]))
    findings += _try_ranks(topology["ranks"], topology["host"], secret)
    return findings


def _fetch(url: str) -> dict[str, Any]:
    try:
        with closing(urllib.request.urlopen(url, timeout=TRY_TIMEOUT_S)) as answer:
            return dict(json.load(answer))
    except urllib.error.HTTPError as exc:
        raise OSError(f"{url} answered {exc.code}: it has no KV connector, or is not ours") from exc
    except urllib.error.URLError as exc:
        raise OSError(f"{url} can't be reached: {exc.reason}") from exc


def _try_control(host: str, port: int) -> Finding:
    what = f"KV side channel {host}:{port}"
    try:
        socket.create_connection((host, port), TRY_TIMEOUT_S).close()
    except OSError as exc:
        return Finding(what, f"can't be reached: {exc}; is the port open between the hosts?")
    return Finding(what)


def _try_ranks(ranks: list[dict[str, Any]], host: str, secret: bytes) -> Iterator[Finding]:
    registry = Registry.discover()
    for rank, facts in enumerate(ranks):
        for name, encoded in facts["endpoints"].items():
            what = f"rank {rank} over {name}"
            address = base64.b64decode(encoded)
            try:
                options = EndpointOptions(host=_own_address(host), secret=secret)
                with closing(Transports.open(registry, options, wanted=name)) as transports:
                    transports.connect({name: address}, timeout=TRY_TIMEOUT_S).peer.close()
            except (HalError, OSError) as exc:
                yield Finding(what, str(exc))
            else:
                yield Finding(what)


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
    moves = backend.capabilities.transports
    return InstancePlan(
        raw.get("name", role),
        role,
        connector,
        ports,
        _facts(raw, backend),
        tuple(reserved_ports(registry, allowed=moves)) if connector else (),
    )


def _facts(raw: dict[str, Any], backend: Backend) -> PairFacts:
    generation = backend.runtime.devices()[0].generation
    hardware = Hardware(backend.name, generation, backend.capabilities.constraints)
    default = default_block_size(backend.capabilities).tokens
    tp_size, pp_size, block_size = (
        _number(key, raw.get(key, otherwise))
        for key, otherwise in (("tp", 1), ("pp", 1), ("block_size", default))
    )
    return PairFacts(hardware, tp_size, block_size, pp_size)


def _number(what: str, given: Any) -> int:
    try:
        return int(given)
    except (ValueError, TypeError) as exc:
        raise DeploymentRefused([f"{what}: wanted a number, got {given!r}"]) from exc
