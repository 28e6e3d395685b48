"""``mooncake-hal doctor``: checks a deployment plan, a host, and the connection to a live peer.

Reads a deployment plan from ``--instance`` flags or a JSON file, checks it by the same rules that
instances apply at start and in the handshake, and tries every port of a live peer. For a transport,
it checks one by one everything that the transport needs on this host.
"""

from __future__ import annotations

import argparse
import base64
import http.client
import json
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mooncake_hal.deployment import (
    DeploymentPlan,
    Hardware,
    InstanceInfo,
    InstancePlan,
    transport_problems,
    usual_block_size,
)
from mooncake_hal.errors import BackendNotFound, BackendUnavailable, DeploymentRefused, HalError
from mooncake_hal.known_hardware import HardwareInfo
from mooncake_hal.negotiation import Transports, offered_transports, reserved_ports
from mooncake_hal.options import read_secret_file
from mooncake_hal.port_range import MAX_PORT, ReservedPorts
from mooncake_hal.ports import Port
from mooncake_hal.registry import Registry
from mooncake_hal.specs import Check, TransportConstraints
from mooncake_hal.transport import EndpointOptions

CONNECT_TIMEOUT_S = 5.0
FIELDS = (
    *("name", "role", "host", "connector", "backend", "generation"),
    *("tp", "pp", "block_size", "http", "kv"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line of ``mooncake-hal doctor``."""
    parser.add_argument(
        "--instance",
        action="append",
        type=_from_flag,
        default=[],
        metavar="KEY=VALUE,...",
        help=f"an instance of the plan; keys: {', '.join(FIELDS)} "
        "(default: role=both,host=127.0.0.1,backend=auto,tp=1,pp=1)",
    )
    parser.add_argument(
        "--file",
        type=Path,
        metavar="FILE",
        help='the plan\'s instances as JSON: {"instances": [{KEY: VALUE, ...}, ...]}',
    )
    parser.add_argument(
        "--peer",
        action="append",
        default=[],
        metavar="URL",
        help="a live instance to connect to, over its side channel and every transport",
    )
    parser.add_argument(
        "--transport",
        action="append",
        default=[],
        metavar="NAME",
        help="check that this host has everything that a transport needs",
    )
    parser.add_argument(
        "--secret-file", type=Path, metavar="FILE", help="the deployment's secret, for --peer"
    )


def run(options: argparse.Namespace) -> int:
    """Run all requested checks; the exit status is 0 if all of them passed.

    Raises:
        HalError: a file can't be read, or holds no secret.
    """
    checks = []
    plans = [*options.instance, *_from_file(options.file)]
    secret = b"" if options.secret_file is None else _secret(options.secret_file)
    registry = Registry.discover()
    if plans:
        checks += examine_plan(registry, plans)
    for name in options.transport:
        checks += examine_transport(registry, name)
    for url in options.peer:
        checks += examine_peer(registry, url, secret)
    if not checks:
        checks = [
            Check("arguments", "nothing to check: pass --instance, --file, --transport or --peer")
        ]
    for check in checks:
        print(check)  # noqa: T201  # the command's output
    return int(any(check.problem for check in checks))


def examine_plan(registry: Registry, plans: list[dict[str, Any]]) -> list[Check]:
    """Check a deployment plan: rules, connectors, ports."""
    try:
        planned = [_planned_hardware(raw, registry) for raw in plans]
        pairs = zip(plans, planned, strict=True)
        deployment = DeploymentPlan(tuple(_plan(raw, found) for raw, found in pairs))
        deployment.validate()
    except DeploymentRefused as exc:
        return [Check("deployment", problem) for problem in exc.problems]
    except HalError as exc:
        return [Check("deployment", str(exc))]
    names = ", ".join(f"{plan.name} ({plan.role})" for plan in deployment.instances)
    absent = dict.fromkeys(found.absent for found in planned if found.absent)
    return [
        *(
            Check(f"{why}; checked by its hardware description, without trying its ports")
            for why in absent
        ),
        Check(f"deployment of {names}: roles, connectors, ports, sizes, hardware"),
        *(_check_transports(registry, p, d) for p, d in deployment.pairs()),
    ]


def _check_transports(registry: Registry, prefill: InstancePlan, decode: InstancePlan) -> Check:
    """Check which transports can move KV between two compatible instances, best first, and why
    their other common ones can't. The handshake selects one of them."""
    assert prefill.info is not None
    assert decode.info is not None
    specs = registry.transports
    shared = sorted(
        {*prefill.info.transports} & {*decode.info.transports},
        key=lambda name: -specs[name][0].priority if name in specs else 0,
    )
    found = transport_problems(prefill.info, decode.info)
    if prefill.host != decode.host:
        for name in shared:
            if name in specs and specs[name][0].is_within_host:
                found[name].append(f"{prefill.host} and {decode.host} are two hosts")
    usable = " or ".join(name for name in shared if not found[name])
    refused = [f"not over {name}: {'; '.join(found[name])}" for name in shared if found[name]]
    pair = f"{prefill.name} to {decode.name}"
    if not usable:
        return Check(pair, "; ".join(refused))
    return Check("; ".join([f"{pair}: KV goes over {usable}", *refused]))


def examine_transport(registry: Registry, name: str) -> list[Check]:
    """Check that this host has everything that a transport needs."""
    if name not in registry.transports:
        known = ", ".join(sorted(registry.transports))
        return [Check(f"transport {name}", f"no installed plugin offers it; known are {known}")]
    spec, _ = registry.transports[name]
    found = spec.probe()
    if not found.ok:
        first = Check(f"transport {name}", found.reason)
    else:
        first = Check(": ".join(filter(None, (f"transport {name}", found.reason))))
    return [first, *spec.examine()]


def examine_peer(registry: Registry, url: str, secret: bytes) -> list[Check]:
    """Connect to all ports of a live instance, from its HTTP port to every rank's transports."""
    if not url.startswith(("http://", "https://")):
        return [Check(f"HTTP of {url}", "wanted --peer http://HOST:PORT, its --host and --port")]
    try:
        topology = _fetch(f"{url.rstrip('/')}/kv/topology")
    except (OSError, ValueError) as exc:
        return [Check(f"HTTP of {url}", str(exc))]
    except http.client.HTTPException as exc:
        reason = f"{url} does not speak HTTP ({type(exc).__name__}): wanted --port of an instance"
        return [Check(f"HTTP of {url}", f"{reason}, not --kv-port")]
    try:
        host, port, ranks = topology["host"], int(topology["port"]), topology["ranks"]
    except (KeyError, TypeError, ValueError):
        return [Check(f"HTTP of {url}", f"{url} is another server, not a mooncake-engine instance")]
    checks = [Check(f"HTTP of {url}")]
    side_channel, problem = f"KV side channel {host}:{port}", None
    try:
        socket.create_connection((host, port), CONNECT_TIMEOUT_S).close()
    except OSError as exc:
        problem = f"can't be reached: {exc}; is the port open between the hosts?"
    checks.append(Check(side_channel, problem))
    checks += _try_ranks(registry, ranks, host, secret)
    return checks


def _fetch(url: str) -> dict[str, Any]:
    try:
        with closing(urllib.request.urlopen(url, timeout=CONNECT_TIMEOUT_S)) as answer:
            found = json.load(answer)
            return found if isinstance(found, dict) else {}
    except urllib.error.HTTPError as exc:
        raise OSError(
            f"{url} returned HTTP {exc.code}: the server has no KV connector, or is not a "
            "mooncake-engine instance"
        ) from exc
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
                # It registers no memory and is closed at once, so it may listen without a secret.
                options = EndpointOptions(
                    host=_own_address(host), secret=secret, allow_no_secret=True
                )
                with closing(Transports.open(registry, options, wanted=name)) as transports:
                    transports.connect({name: address}, timeout=CONNECT_TIMEOUT_S).peer.close()
            except (HalError, OSError) as exc:
                yield Check(what, str(exc))
            else:
                yield Check(what)


def _own_address(host: str) -> str:
    """This machine's address towards the peer; no packet is sent."""
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
                f'--file {path}: wanted JSON such as {{"instances": [{{"role": "prefill"}}]}}, but '
                f"it can't be parsed ({type(exc).__name__}: {exc})"
            ]
        ) from exc


def _secret(path: Path) -> bytes:
    advice = "put the deployment's secret there, or omit the option if it has none"
    return read_secret_file(path, "--secret-file", advice, HalError).encode()


@dataclass(frozen=True, slots=True)
class PlannedHardware:
    """The hardware of an instance in a plan.

    Args:
        hardware, block_sizes, transports: see ``HardwareInfo``.
        reserved: ports of this machine that libraries below its transports may take.
        absent: why the hardware is not on this machine; empty if it is.
    """

    hardware: Hardware
    block_sizes: tuple[int, ...]
    transports: Mapping[str, TransportConstraints]
    reserved: tuple[ReservedPorts, ...] = ()
    absent: str = ""


def _planned_hardware(raw: dict[str, Any], registry: Registry) -> PlannedHardware:
    """Get an instance's hardware from the backend if it is available, otherwise from its hardware
    description.

    Raises:
        HalError: the backend is unavailable and has no hardware description.
        DeploymentRefused: the backend has no such generation.
    """
    name, generation = raw.get("backend", "auto"), raw.get("generation")
    try:
        backend = registry.select_backend(name)
    except (BackendUnavailable, BackendNotFound) as exc:
        known = registry.known_hardware(name)
        if known is None:
            raise
        absent = f"{name} is not on this machine ({getattr(exc, 'reason', 'not installed')})"
        return _described_hardware(name, generation, known, absent)
    own, capabilities = backend.runtime.devices()[0].generation, backend.capabilities
    if generation not in (None, own):
        known = registry.known_hardware(name)
        if known is None:
            raise DeploymentRefused(
                [f"{name} has generation {own} here, and generation {generation} is not known"]
            )
        absent = f"{name} of generation {generation} is not on this machine"
        return _described_hardware(name, generation, known, absent)
    allowed = capabilities.transports
    reserved = tuple(reserved_ports(registry, allowed=allowed)) if _connector(raw) else ()
    transports = offered_transports(registry, allowed=allowed)
    hardware = Hardware(backend.name, own)
    return PlannedHardware(hardware, capabilities.block_sizes, transports, reserved)


def _described_hardware(
    name: str, generation: str | None, hardware: HardwareInfo, absent: str
) -> PlannedHardware:
    wanted = generation or next(iter(hardware.generations), "")
    if hardware.generations and wanted not in hardware.generations:
        known = ", ".join(hardware.generations)
        raise DeploymentRefused([f"{name} has no generation {wanted!r}; known are {known}"])
    if generation is None and len(hardware.generations) > 1:
        absent += f"; {wanted} is assumed, as no generation was given"
    return PlannedHardware(
        Hardware(name, wanted), hardware.block_sizes, hardware.transports, absent=absent
    )


def _connector(raw: dict[str, Any]) -> str:
    default = "" if raw.get("role", "both") == "both" else "MooncakeConnector"
    return str(raw.get("connector", default))


def _plan(raw: dict[str, Any], found: PlannedHardware) -> InstancePlan:
    unknown = sorted(set(raw) - set(FIELDS))
    if unknown:
        raise DeploymentRefused([f"unknown keys {unknown}; known are {list(FIELDS)}"])
    role = raw.get("role", "both")
    host = raw.get("host", "127.0.0.1")
    wanted = (("HTTP", raw.get("http")), ("KV side channel", raw.get("kv")))
    ports = tuple(Port(what, host, _port(what, number)) for what, number in wanted if number)
    block_size = _number("block_size", raw.get("block_size", usual_block_size(found.block_sizes)))
    if block_size not in found.block_sizes and block_size > 0:
        sizes = ", ".join(map(str, sorted(found.block_sizes)))
        raise DeploymentRefused(
            [f"block_size {block_size} is not supported: {found.hardware.backend} has {sizes}"]
        )
    return InstancePlan(
        raw.get("name", role),
        role,
        _connector(raw),
        () if found.absent else ports,
        InstanceInfo(
            found.hardware,
            tp_size=_number("tp", raw.get("tp", 1)),
            block_size=block_size,
            pp_size=_number("pp", raw.get("pp", 1)),
            transports=found.transports,
        ),
        found.reserved,
        host,
    )


def _port(what: str, given: Any) -> int:
    port = _number(what, given)
    if not 0 <= port <= MAX_PORT:
        raise DeploymentRefused([f"{what}: wanted a port, 0 to {MAX_PORT}, got {port}"])
    return port


def _number(what: str, given: Any) -> int:
    try:
        return int(given)
    except (ValueError, TypeError) as exc:
        raise DeploymentRefused([f"{what}: wanted a number, got {given!r}"]) from exc
