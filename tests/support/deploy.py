"""Deployment files as data: command lines by place, manifests, the workflow."""

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

from mooncake_conductor.cli import build_parser as conductor_parser
from mooncake_engine.cli import build_parser as engine_parser
from mooncake_engine.vllm_flags import with_model_flag
from mooncake_hal import bench, doctor
from mooncake_hal.cli import build_parser as hal_parser
from mooncake_kv.cli import build_parser as kv_parser
from mooncake_proxy.proxy_options import build_parser as proxy_parser

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
PROGRAMS = {
    "mooncake-conductor": conductor_parser,
    "mooncake-engine": engine_parser,
    "mooncake-hal": hal_parser,
    "mooncake-kv": kv_parser,
    "mooncake-proxy": proxy_parser,
}
LOADED_LATE = {("mooncake-hal", "doctor"): doctor, ("mooncake-hal", "bench"): bench}
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
LEFT_OUT = {"...", "…", "MODE"}
"""Words in an example that stand for left-out options."""

_DEFAULT = re.compile(r"\$\{\w+:-(?P<default>[^}]*)\}")
_VARIABLE = re.compile(r"\$\{?(?P<name>\w+)\}?")


def parse(command: list[str]) -> argparse.Namespace:
    """Parse a command line with the program's own parser.

    Raises:
        SystemExit: the program has no such flag or rejects a value.
    """
    if module := LOADED_LATE.get(tuple(command[:2])):
        parser = argparse.ArgumentParser()
        module.add_arguments(parser)
        return parser.parse_args(command[2 if module is doctor else 3 :])
    program, arguments = command[0], command[1:]
    if program == "mooncake-engine":
        arguments = list(with_model_flag(arguments, ("serve", "up")))
        if arguments[:2] == ["bench", "serve"]:
            arguments = ["bench serve", *arguments[2:]]
    return PROGRAMS[program]().parse_args(arguments)


def read_yaml(path: Path) -> list[Any]:
    """The documents of a YAML file."""
    texts = re.split(r"^---$", path.read_text(), flags=re.MULTILINE)
    return [msgspec.yaml.decode(text) for text in texts]


def compose(name: str = "compose.yaml") -> dict[str, Any]:
    """A compose file with its variables at their defaults."""
    text = (DEPLOY / "docker" / name).read_text()
    content: dict[str, Any] = msgspec.yaml.decode(_DEFAULT.sub(r"\g<default>", text))
    return content


def compose_commands(name: str = "compose.yaml") -> dict[str, list[str]]:
    """The whole command line of each service of a compose file. One that has no image is of
    compose.yaml."""
    programs = {"mooncake-engine:cpu": "mooncake-engine", "mooncake-proxy": "mooncake-proxy"}
    found = {}
    for service, content in compose(name)["services"].items():
        image = content.get("image") or compose()["services"][service]["image"]
        program = content.get("entrypoint", [programs[image]])
        found[service] = [*program, *content["command"]]
    return found


def manifests(folder: str = "kubernetes") -> list[dict[str, Any]]:
    """Every object that ``kubectl apply -k`` would create from a folder of deploy/, in order."""
    path = DEPLOY / folder
    [kustomization] = read_yaml(path / "kustomization.yaml")
    found: list[dict[str, Any]] = []
    for name in kustomization["resources"]:
        is_base = (path / name).is_dir()
        found += manifests((path / name).resolve().name) if is_base else read_yaml(path / name)
    for patch in kustomization.get("patches", []):
        kind, selector = patch["target"]["kind"], patch["target"]["labelSelector"]
        label, value = selector.split("=")
        for each in found:
            if each["kind"] == kind and each["metadata"]["labels"].get(label) == value:
                _add_by_patch(each, patch["patch"])
    return found


def _add_by_patch(manifest: dict[str, Any], patch: str) -> None:
    """Apply a JSON patch (RFC 6902) that only appends to lists and adds fields."""
    for operation in msgspec.yaml.decode(patch):
        *names, last = operation["path"].split("/")[1:]
        assert operation["op"] == "add"
        place: Any = manifest
        for name in names:
            place = place[int(name)] if isinstance(place, list) else place[name]
        if last == "-":
            place.append(operation["value"])
        else:
            assert last not in place, "it would replace the field"
            place[last] = operation["value"]


def deployments(folder: str = "kubernetes", kind: str = "Deployment") -> dict[str, dict[str, Any]]:
    """Pod templates of the Deployments, or of objects of another kind, by name."""
    return {
        found["metadata"]["name"]: found["spec"]["template"]
        for found in manifests(folder)
        if found["kind"] == kind
    }


def pod_command(template: dict[str, Any]) -> list[str]:
    """The whole command line of a pod's only container."""
    [container] = template["spec"]["containers"]
    program = container.get("command", [container["image"].split(":")[0]])
    here = {"$(POD_IP)": "10.1.2.3", "$(HOST_IP)": "10.0.0.3"}
    words = [*program, *container["args"]]
    for variable, address in here.items():
        words = [word.replace(variable, address) for word in words]
    return words


def environment_of(path: Path) -> dict[str, str]:
    """The variables in an environment file of systemd."""
    lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    return dict(line.split("=", 1) for line in lines)


def unit_command(unit: Path, environment: dict[str, str]) -> list[str]:
    """The command line that a unit starts in that environment; the program without its folder."""
    text = unit.read_text().replace("\\\n", " ")
    [line] = re.findall(r"^ExecStart=(.+)$", text, flags=re.MULTILINE)
    known = environment | {"CREDENTIALS_DIRECTORY": "/run/credentials"}
    words = shlex.split(_VARIABLE.sub(lambda found: known[found["name"]], line))
    return [Path(words[0]).name, *words[1:]]


def document_commands() -> Iterator[tuple[str, list[str]]]:
    """Whole command lines of our programs in the guides: where they are, and their words."""
    for path in DOCUMENTS:
        text = re.sub(r" \\\n *", " ", path.read_text())  # joins continued lines
        for number, line in enumerate(text.splitlines(), 1):
            words = line.split()
            if not line.startswith("    ") or not words or words[0] not in PROGRAMS:
                continue
            if not LEFT_OUT & {*words} and "(" not in line:  # words in a diagram
                yield f"{path.name}:{number}", shlex.split(line, comments=True)


def document_flags() -> Iterator[tuple[str, str]]:
    """Flags in the guides' command lines of our programs, whole or partial: where, and which."""
    for path in DOCUMENTS:
        for number, line in enumerate(path.read_text().splitlines(), 1):
            for code in [line.strip(), *re.findall(r"`([^`]+)`", line)]:
                if code.split(" ")[0] in PROGRAMS:
                    for flag in re.findall(r"(?<![\w-])--[a-z][\w-]*", code):
                        yield f"{path.name}:{number}", flag


def all_flags() -> set[str]:
    """Every flag of our programs."""
    parsers = [build() for build in PROGRAMS.values()]
    for module in LOADED_LATE.values():
        parsers.append(argparse.ArgumentParser())
        module.add_arguments(parsers[-1])
    found: set[str] = set()
    while parsers:
        for action in parsers.pop()._actions:
            found.update(action.option_strings)
            if isinstance(action, argparse._SubParsersAction):
                parsers += action.choices.values()
    return found


def load_script(name: str) -> ModuleType:
    """A Python file of ci/ as a module; such files import each other."""
    if str(ROOT / "ci") not in sys.path:
        sys.path.append(str(ROOT / "ci"))
    spec = importlib.util.spec_from_file_location(f"ci_{name}", ROOT / "ci" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
