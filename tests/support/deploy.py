"""Deployment files as data: command lines by where they stand, manifests, the workflow."""

from __future__ import annotations

import argparse
import importlib.util
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec

from mooncake_engine.cli import build_parser as engine_parser
from mooncake_hal import doctor
from mooncake_hal.cli import build_parser as hal_parser
from mooncake_proxy.proxy_options import build_parser as proxy_parser

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
PROGRAMS = ("mooncake-engine", "mooncake-hal", "mooncake-proxy")
DOCUMENTS = [
    *(ROOT / "docs" / name for name in ("deployment.md", "hardware.md")),
    ROOT / "README.md",
]

_DEFAULT = re.compile(r"\$\{\w+:-(?P<default>[^}]*)\}")
_VARIABLE = re.compile(r"\$\{?(?P<name>\w+)\}?")


def parse(command: list[str]) -> argparse.Namespace:
    """What the program itself makes of a command line.

    Raises:
        SystemExit: it has no such flag, or no such value.
    """
    program, *arguments = command
    if program == "mooncake-hal" and arguments[0] == "doctor":
        parser = argparse.ArgumentParser()
        doctor.add_arguments(parser)
        return parser.parse_args(arguments[1:])
    builders = {
        "mooncake-engine": engine_parser,
        "mooncake-hal": hal_parser,
        "mooncake-proxy": proxy_parser,
    }
    return builders[program]().parse_args(arguments)


def read_yaml(path: Path) -> list[Any]:
    """The documents of a YAML file."""
    texts = re.split(r"^---$", path.read_text(), flags=re.MULTILINE)
    return [msgspec.yaml.decode(text) for text in texts]


def compose() -> dict[str, Any]:
    """The compose file, variables at their defaults."""
    text = (DEPLOY / "docker" / "compose.yaml").read_text()
    content: dict[str, Any] = msgspec.yaml.decode(_DEFAULT.sub(r"\g<default>", text))
    return content


def compose_commands() -> dict[str, list[str]]:
    """Service to its whole command line."""
    programs = {"mooncake-engine:cpu": "mooncake-engine", "mooncake-proxy": "mooncake-proxy"}
    return {
        name: [programs[service["image"]], *service["command"]]
        for name, service in compose()["services"].items()
    }


def manifests() -> list[dict[str, Any]]:
    """Every object that ``kubectl apply -k`` would create, in its order."""
    [kustomization] = read_yaml(DEPLOY / "kubernetes" / "kustomization.yaml")
    return [
        found
        for name in kustomization["resources"]
        for found in read_yaml(DEPLOY / "kubernetes" / name)
    ]


def deployments() -> dict[str, dict[str, Any]]:
    """Pod templates of the Deployments, by name."""
    return {
        found["metadata"]["name"]: found["spec"]["template"]
        for found in manifests()
        if found["kind"] == "Deployment"
    }


def pod_command(template: dict[str, Any]) -> list[str]:
    """The whole command line of a pod's only container."""
    [container] = template["spec"]["containers"]
    program = container["image"].split(":")[0]
    return [program, *(word.replace("$(POD_IP)", "10.1.2.3") for word in container["args"])]


def environment_of(path: Path) -> dict[str, str]:
    """An environment file of systemd."""
    lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    return dict(line.split("=", 1) for line in lines)


def unit_command(unit: Path, environment: dict[str, str]) -> list[str]:
    """What a unit starts with that environment; the program without its folder."""
    text = unit.read_text().replace("\\\n", " ")
    [line] = re.findall(r"^ExecStart=(.*)$", text, flags=re.MULTILINE)
    known = environment | {"CREDENTIALS_DIRECTORY": "/run/credentials"}
    words = shlex.split(_VARIABLE.sub(lambda found: known[found["name"]], line))
    return [Path(words[0]).name, *words[1:]]


def document_commands() -> Iterator[tuple[str, list[str]]]:
    """Command lines of ours in the guides: where they stand, and their words."""
    for path in DOCUMENTS:
        for number, line in enumerate(path.read_text().splitlines(), 1):
            words = line.strip()
            if line.startswith("    ") and words.split(" ")[0] in PROGRAMS:
                yield f"{path.name}:{number}", shlex.split(words, comments=True)


def load_script(name: str) -> ModuleType:
    """A Python file of ci/ as a module."""
    spec = importlib.util.spec_from_file_location(f"ci_{name}", ROOT / "ci" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
