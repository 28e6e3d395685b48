"""Dockerfiles: copied files exist and are in the build context, and images meet operators'
expectations."""

from __future__ import annotations

import re
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version
from support.deploy import DEPLOY, ROOT, compose, compose_commands, deployments, parse, pod_command

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

IMAGES = sorted((DEPLOY / "docker").glob("Dockerfile.*"))
ENGINES = [path for path in IMAGES if path.suffix != ".proxy"]


def instructions(path: Path) -> list[tuple[str, str]]:
    """(instruction, arguments) of a Dockerfile, continuation lines joined, without comments."""
    lines = [line for line in path.read_text().splitlines() if not line.lstrip().startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    pairs = [line.split(None, 1) for line in joined.splitlines() if line.strip()]
    return [(name, " ".join(arguments.split())) for name, arguments in pairs]


def arguments_of(path: Path, instruction: str) -> list[str]:
    return [arguments for name, arguments in instructions(path) if name == instruction]


def copied(path: Path) -> list[str]:
    """Sources of COPY that come from the repository."""
    sources = []
    for arguments in arguments_of(path, "COPY"):
        words = [word for word in arguments.split() if not word.startswith("--")]
        sources += words[:-1]
    return sources


def is_in_context(source: str) -> bool:
    """Whether .dockerignore, which excludes everything by default, includes it."""
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    kept = [line[1:] for line in lines if line.startswith("!")]
    return "*" in lines and any(fnmatch(source, name) for name in kept)


def test_every_kind_has_an_image() -> None:
    assert [path.suffix for path in IMAGES] == [".ascend", ".cpu", ".cuda", ".proxy"]


@pytest.mark.parametrize("path", IMAGES, ids=lambda path: path.suffix)
def test_copied_files_exist_and_are_in_context(path: Path) -> None:
    assert copied(path)
    for source in copied(path):
        assert (ROOT / source).exists(), source
        assert is_in_context(source), f"{source} is not in .dockerignore's list"


def test_context_has_no_other_files() -> None:
    kept = re.findall(r"^!(.+)$", (ROOT / ".dockerignore").read_text(), flags=re.MULTILINE)
    assert set(kept) == {source for path in IMAGES for source in copied(path)}


@pytest.mark.parametrize("path", IMAGES, ids=lambda path: path.suffix)
def test_image_runs_without_root_and_has_health_check(path: Path) -> None:
    assert arguments_of(path, "USER")[-1].split(":")[0] == "10001"
    assert len(arguments_of(path, "HEALTHCHECK")) == 1
    assert len(arguments_of(path, "FROM")) == 2, "wheels are built in a stage of their own"
    for run in arguments_of(path, "RUN"):
        assert "pip" not in run or "--no-cache-dir" in run or "venv" in run
        assert "apt-get install" not in run or "rm -rf /var/lib/apt/lists" in run


@pytest.mark.parametrize("path", IMAGES, ids=lambda path: path.suffix)
def test_wheels_are_built_from_folders_with_a_project(path: Path) -> None:
    [build] = [run for run in arguments_of(path, "RUN") if run.startswith("pip wheel")]
    folders = [word for word in build.split() if word.startswith(".")]
    assert folders
    for folder in folders:
        assert (ROOT / folder / "pyproject.toml").is_file()
        assert folder == "." or folder.removeprefix("./").split("/")[0] in copied(path)


@pytest.mark.parametrize("path", IMAGES, ids=lambda path: path.suffix)
def test_own_packages_are_installed_from_files_never_by_name(path: Path) -> None:
    """A package index may have the same name with a higher version."""
    installs = [run for run in arguments_of(path, "RUN") if "pip install" in run]
    assert any("/wheels/" in run for run in installs)
    for run in installs:
        words = run.replace('"', " ").split()
        assert "--find-links" not in words
        assert not [word for word in words if re.match(r"mooncake[-_]", word)]


@pytest.mark.parametrize("path", IMAGES, ids=lambda path: path.suffix)
def test_other_packages_except_torch_are_installed_by_hash(path: Path) -> None:
    """Torch has an index per accelerator, so it is pinned by version."""
    installs = [run for run in arguments_of(path, "RUN") if "pip install" in run]
    by_hash = [run for run in installs if "--require-hashes" in run and "--no-deps" in run]
    by_file = [run for run in installs if "/wheels/" in run and "--no-deps" in run]
    others = [run for run in installs if run not in by_hash + by_file]
    assert (len(by_hash), len(by_file)) == (1, 1)
    assert len(others) == (path in ENGINES)
    assert all("torch" in run and "-r" not in run.split() for run in others)


@pytest.mark.parametrize(
    ("image", "projects", "extras"),
    [
        ("proxy", ["proxy"], {"yaml", "otel"}),
        ("engine", [".", "kv", "engine"], {"structured", "otel"}),
    ],
)
def test_locks_cover_project_dependencies(
    image: str, projects: list[str], extras: set[str]
) -> None:
    """To fix a failure, run ci/lock-images."""
    locked: dict[str, list[Version]] = {}
    covered: set[str] = set()
    for line in (DEPLOY / "docker" / f"requirements-{image}.txt").read_text().splitlines():
        if "==" in line:
            name, version = line.split(";")[0].strip(" \\").split("==")
            locked.setdefault(canonicalize_name(name), []).append(Version(version))
    for folder in projects:
        project = tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"]
        optional = project.get("optional-dependencies", {})
        here = extras & optional.keys()
        covered |= here
        wanted = [*project["dependencies"], *(each for name in here for each in optional[name])]
        for requirement in map(Requirement, wanted):
            name = canonicalize_name(requirement.name)
            is_elsewhere = name == "torch" or name.startswith("mooncake")
            if is_elsewhere or "python_version" in str(requirement.marker):
                continue
            versions = locked[name]
            assert all(version in requirement.specifier for version in versions), requirement
    assert covered == extras


@pytest.mark.parametrize("path", ENGINES, ids=lambda path: path.suffix)
def test_instances_on_shared_cores_do_not_spin(path: Path) -> None:
    assert any("OMP_WAIT_POLICY=PASSIVE" in line for line in arguments_of(path, "ENV"))
    [backend] = re.findall(r"MOONCAKE_HAL_BACKEND=(\w+)", path.read_text())
    assert backend == path.suffix.removeprefix(".")


@pytest.mark.parametrize("path", IMAGES, ids=lambda path: path.suffix)
def test_health_check_uses_served_port(path: Path) -> None:
    [port] = re.findall(r"MOONCAKE_HEALTH_URL=http://127.0.0.1:(\d+)/health", path.read_text())
    assert port in arguments_of(path, "EXPOSE")[0].split()
    program = "mooncake-proxy" if path.suffix == ".proxy" else "mooncake-engine"
    pods = [pod_command(template) for template in deployments().values()]
    commands = [*compose_commands().values(), *pods]
    ports = {parse(command).port for command in commands if command[0] == program}
    assert ports == {int(port)}


def test_accelerator_images_have_a_transport_between_hosts() -> None:
    """The packages without which the probes of rdma and hccs say no."""
    installs = {
        path.suffix: [run for run in arguments_of(path, "RUN") if "install" in run]
        for path in ENGINES
    }
    [system] = [run for run in installs[".cuda"] if "apt-get" in run]
    assert {"rdma-core", "ibverbs-providers", "python3-pyverbs"} <= {*system.split()}
    assert "dist-packages/pyverbs /opt/mooncake/lib/" in system, "the venv sees it"
    ascend = DEPLOY / "docker" / "Dockerfile.ascend"
    [engine] = [a for a in arguments_of(ascend, "ARG") if a.startswith("TRANSFER_ENGINE=")]
    assert engine.removeprefix("TRANSFER_ENGINE=") in (ROOT / "ci/test-ascend-contract").read_text()
    assert any('--no-deps "${TRANSFER_ENGINE}"' in run for run in installs[".ascend"])


def test_ascend_image_lists_mounts() -> None:
    text = (DEPLOY / "docker" / "Dockerfile.ascend").read_text()
    for needed in ("/etc/hccn.conf", "/dev/davinci0", "/dev/davinci_manager", "/dev/hisi_hdc"):
        assert needed in text
    assert "ARG CANN_IMAGE=quay.io/ascend/cann:" in text


@pytest.mark.parametrize("path", IMAGES, ids=lambda path: path.suffix)
def test_base_image_can_be_pinned(path: Path) -> None:
    """By `ci/lock-images --bases`, or by a build argument for one build."""
    declared = [argument.partition("=") for argument in arguments_of(path, "ARG")]
    bases = {name: image for name, _, image in declared if name.endswith("_IMAGE")}
    used = {base.split()[0] for base in arguments_of(path, "FROM")}
    assert used == {f"${{{name}}}" for name in bases}
    assert all(re.fullmatch(r"[\w./-]+:[\w.-]+(@sha256:[0-9a-f]{64})?", i) for i in bases.values())


def test_compose_builds_images_that_exist() -> None:
    added = compose("compose.store.yaml")["services"]
    for service in (*compose()["services"].values(), added["store"]):
        context = DEPLOY / "docker" / service["build"]["context"]
        assert context.resolve() == ROOT
        assert (context / service["build"]["dockerfile"]).is_file()
