"""Extracts the interfaces of vLLM releases that our connector uses, from their sources.

    python ci/vllm_interfaces.py            # rewrite tests/contract/vllm/*.json
    python ci/vllm_interfaces.py --check    # exit 1 if a release differs from its file

Downloads each release's source distribution with pip into .cache/vllm-sources, and records what the
connector overrides, reads and imports: signatures, members, call sites. The tests in
tests/contract/vllm compare our code with these files, without vLLM and without torch. For a new
release, add it to VERSIONS, run this, and address the test failures.

Exits 77 with "skipped: ..." and the reason if a source distribution can't be downloaded.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import tarfile
import venv
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from vllm_environment import CACHE, ROOT, SKIPPED, Skip, run

VERSIONS = ("0.30.0", "0.31.0", "0.32.0", "0.33.0")
SOURCES = CACHE / "vllm-sources"
CONTRACTS = ROOT / "tests" / "contract" / "vllm"
CONNECTOR = "distributed/kv_transfer/kv_connector"
CLASSES = {
    f"{CONNECTOR}/v1/base.py": ("KVConnectorBase_V1", "KVConnectorTransferResults", "SupportsHMA"),
    f"{CONNECTOR}/v1/metrics.py": ("KVConnectorStats", "KVConnectorPromMetrics"),
    f"{CONNECTOR}/factory.py": ("KVConnectorFactory",),
    "v1/request.py": ("Request", "RequestStatus"),
    "multimodal/inputs.py": ("MultiModalFeatureSpec", "PlaceholderRange"),
    "v1/core/kv_cache_manager.py": ("KVCacheBlocks",),
    "v1/core/block_pool.py": ("BlockPool",),
    "v1/core/sched/output.py": ("NewRequestData", "CachedRequestData", "SchedulerOutput"),
    "v1/kv_cache_interface.py": (
        "KVCacheConfig",
        "KVCacheGroupSpec",
        "KVCacheSpec",
        "AttentionSpec",
        "FullAttentionSpec",
        "SlidingWindowSpec",
        "MLAAttentionSpec",
    ),
    "v1/kv_cache_layout.py": ("KVCacheLayout",),
    "v1/metrics/cache_hit_source.py": ("CacheHitSource",),
    "distributed/kv_events.py": ("BlockStored", "BlockRemoved"),
    "config/vllm.py": ("VllmConfig",),
    "config/kv_events.py": ("KVEventsConfig",),
    "config/model.py": ("ModelConfig",),
    "config/load.py": ("LoadConfig",),
    "config/parallel.py": ("ParallelConfig",),
    "config/kv_transfer.py": ("KVTransferConfig",),
    "config/compilation.py": ("CompilationConfig",),
    "platforms/interface.py": ("Platform",),
    "distributed/parallel_state.py": ("GroupCoordinator",),
    "model_executor/layers/attention_layer_base.py": ("AttentionLayerBase",),
    "v1/attention/backend.py": ("AttentionBackend",),
}
"""Classes that our code overrides, calls or reads, by file."""
NEWER = ("v1/metrics/cache_hit_source.py",)
"""Those of the files that the oldest releases don't have."""
CALLERS = (
    "v1/core/sched/scheduler.py",
    "v1/engine/core.py",
    "v1/worker/kv_connector_model_runner_mixin.py",
    "v1/worker/gpu/kv_connector.py",
    "v1/worker/gpu_model_runner.py",
    "v1/worker/gpu_worker.py",
)
"""Files in which vLLM calls a connector."""
RECEIVERS = ("connector", "kv_connector", "get_kv_transfer_group()", "kv_transfer_group")
RESETS = (("BlockPool", "reset_prefix_cache"),)
"""Methods whose calls our code detects by the attributes that they replace."""
BODIES = {
    "v1/engine/parallel_sampling.py": ("get_child_info",),
    "entrypoints/openai/completion/serving.py": ("create_completion", "render_completion_request"),
    "entrypoints/generate/base/serving.py": ("_with_kv_transfer_rejection_cleanup",),
    "v1/worker/worker_base.py": ("initialize_from_config",),
}
"""Methods on whose bodies we depend: the ids of a request's choices, that the connector gets the
parameters of a request that the front end refuses, and that a worker's connector can read vLLM's
own configuration."""
PACKAGES = {
    "": ("__version__",),
    "config": ("get_current_vllm_config_or_none",),
    "distributed": ("get_pp_group", "get_tp_group"),
    "platforms": ("current_platform",),
}
"""Packages, below vLLM's own, from which we import names directly."""
WITH_SIGNATURES = (
    "KVConnectorBase_V1",
    "SupportsHMA",
    "KVConnectorStats",
    "KVConnectorPromMetrics",
    "KVConnectorFactory",
    "KVCacheBlocks",
    "BlockPool",
)
"""Classes that are overridden or called, whose signatures are recorded; for others, names are."""
STUB_TORCH = '__version__ = "2.13.0"\nclass version:\n    cuda = hip = xpu = None\n'
BUILD_NEEDS = (
    "setuptools>=77.0.3",  # accepts "license" as a string; venvs contain an older one
    "setuptools_scm",
    "setuptools-rust",
    "wheel",
    "packaging",
    "jinja2",
    "regex",
)
Facts = dict[str, Any]


def main(arguments: list[str]) -> int:
    """Write the files, or with ``--check`` compare them."""
    texts = {version: partial(_text_of, version) for version in VERSIONS}
    return write_or_compare("vLLM", CONTRACTS, texts, arguments)


def _text_of(version: str) -> str:
    return as_text(describe(fetch(version)))


def write_or_compare(
    project: str, contracts: Path, texts: dict[str, Callable[[], str]], arguments: list[str]
) -> int:
    """Write a file per release, or with ``--check`` compare them; returns the exit status.

    Args:
        project: project name for messages.
        contracts: folder of the files.
        texts: functions that return the text of each release's file, by release; may raise
            ``Skip``.
        arguments: the command line's arguments.
    """
    differing = []
    try:
        for version, make_text in texts.items():
            text = make_text()
            path = contracts / f"{version}.json"
            if "--check" not in arguments:
                path.write_text(text)
            elif not path.exists() or path.read_text() != text:
                differing.append(path)
    except Skip as reason:
        print(f"skipped: {reason}")
        return SKIPPED
    for path in differing:
        print(f"{project} {path.stem} differs from {path.relative_to(ROOT)}")
    return int(bool(differing))


# ---------------------------------------------------------------- sources


def fetch(version: str) -> Path:
    """Download a release's source distribution; returns the package's folder."""
    package = SOURCES / f"vllm-{version}" / "vllm"
    if not package.exists():
        archive = SOURCES / f"vllm-{version}.tar.gz"
        if not archive.exists():
            download("vllm", version, VLLM_TARGET_DEVICE="empty", VLLM_VERSION_OVERRIDE=version)
        unpack(archive)
    return package


def unpack(archive: Path) -> None:
    """Extract the Python files of a source distribution."""
    with tarfile.open(archive) as file:
        members = [each for each in file if each.name.endswith(".py")]
        file.extractall(SOURCES, members, filter="data")


def download(name: str, version: str, **variables: str) -> None:
    """Download a source distribution. pip runs its setup.py to get metadata, which imports torch: a
    stub with only torch's version satisfies it."""
    home = SOURCES / "venv"
    python = home / "bin" / "python"
    if not python.exists():
        venv.create(home, with_pip=True)
    run(
        [python, "-m", "pip", "-q", "install", *BUILD_NEEDS], "installing vLLM's build requirements"
    )
    stub = SOURCES / "stub" / "torch"
    (stub / "utils").mkdir(parents=True, exist_ok=True)
    (stub / "__init__.py").write_text(STUB_TORCH)
    (stub / "utils" / "__init__.py").touch()
    (stub.parent / "torch_npu").mkdir(exist_ok=True)
    (stub.parent / "torch_npu" / "__init__.py").touch()
    (stub / "utils" / "cpp_extension.py").write_text("CUDA_HOME = ROCM_HOME = None\n")
    environment = os.environ | {"PYTHONPATH": str(stub.parent)} | variables
    command = [python, "-m", "pip", "-q", "download", f"{name}=={version}", "--dest", SOURCES]
    command += ["--no-deps", "--no-binary", name, "--no-build-isolation"]
    print(f"-- pip download {name}=={version}", flush=True)
    done = subprocess.run(
        [str(word) for word in command], env=environment, capture_output=True, text=True
    )
    if done.returncode:
        raise Skip(f"pip download {name}=={version}: {done.stderr.strip().splitlines()[-1:]}")


# ---------------------------------------------------------------- facts


def describe(package: Path) -> Facts:
    """The facts about a release that our connector depends on."""
    nodes: dict[str, ast.ClassDef] = {}
    for path, names in CLASSES.items():
        if path in NEWER and not (package / path).exists():
            continue
        tree = ast.parse((package / path).read_text())
        found = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
        nodes |= {name: found[name] for name in names}
    classes = {name: describe_class(node) for name, node in nodes.items()}
    return {
        "methods": {name: classes[name]["methods"] for name in WITH_SIGNATURES},
        "members": {name: sorted(facts["members"]) for name, facts in classes.items()},
        "bases": {name: facts["bases"] for name, facts in classes.items()},
        "calls": {
            f"{name}({', '.join([*('_' * count), *keywords])})": [name, count, keywords]
            for name, count, keywords in sorted(calls(package))
        },
        "resets": {
            f"{name}.{method.name}": sorted(assigned_to_self(method))
            for name, wanted in RESETS
            for method in nodes[name].body
            if isinstance(method, ast.FunctionDef) and method.name == wanted
        },
        "bodies": {
            name: texts
            for path, wanted in BODIES.items()
            for name, texts in bodies(ast.parse((package / path).read_text()), wanted)
        },
        "names": {
            package_name: sorted({*wanted} & {*module_texts(package, package_name)})
            for package_name, wanted in PACKAGES.items()
        },
    }


def as_text(facts: Facts) -> str:
    """Format facts as JSON with one line per method, class and call."""
    parts = []
    for topic, entries in facts.items():
        rows = []
        for name, value in entries.items():
            if topic == "methods":
                lines = ",\n   ".join(f"{json.dumps(m)}: {json.dumps(s)}" for m, s in value.items())
                rows.append(f"  {json.dumps(name)}: {{\n   {lines}\n  }}")
            else:
                rows.append(f"  {json.dumps(name)}: {json.dumps(value)}")
        parts.append(f" {json.dumps(topic)}: {{\n" + ",\n".join(rows) + "\n }")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def describe_class(node: ast.ClassDef) -> Facts:
    """Bases, methods with their signatures, and the names of all members."""
    methods: Facts = {}
    members: set[str] = set()
    for each in node.body:
        if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef):
            kinds = [ast.unparse(one).split(".")[-1] for one in each.decorator_list]
            if not {"property", "cached_property"} & {*kinds}:
                methods[each.name] = signature(each, kinds)
            members |= {each.name, *assigned_to_self(each)}
        elif isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
            members.add(each.target.id)
        elif isinstance(each, ast.Assign):
            members |= {one.id for one in each.targets if isinstance(one, ast.Name)}
    bases = [ast.unparse(base) for base in node.bases]
    return {"bases": bases, "methods": methods, "members": members}


def signature(node: ast.FunctionDef | ast.AsyncFunctionDef, kinds: list[str]) -> Facts:
    """A method's parameters without the first one, and whether a subclass must implement it."""
    positional = [each.arg for each in (*node.args.posonlyargs, *node.args.args)]
    return {
        "abstract": "abstractmethod" in kinds,
        "parameters": positional if "staticmethod" in kinds else positional[1:],
        "num_optional": len(node.args.defaults),
        "keywords": [each.arg for each in node.args.kwonlyargs],
        "takes_any_keyword": node.args.kwarg is not None,
    }


def assigned_to_self(function: ast.AST) -> Iterator[str]:
    """Names of the attributes that a method assigns."""
    for node in ast.walk(function):
        is_attribute = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        if is_attribute and isinstance(node.value, ast.Name) and node.value.id == "self":
            yield node.attr


def bodies(tree: ast.Module, wanted: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """The f-strings and the functions called in methods, by name."""
    for method in ast.walk(tree):
        if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef) and method.name in wanted:
            strings = {ast.unparse(n) for n in ast.walk(method) if isinstance(n, ast.JoinedStr)}
            called = {ast.unparse(n.func) for n in ast.walk(method) if isinstance(n, ast.Call)}
            yield method.name, sorted(strings | called)


def calls(package: Path) -> Iterator[tuple[str, int, list[str]]]:
    """Calls of a connector: method, number of positional arguments, names of keyword arguments."""
    seen = set()
    for path in CALLERS:
        for node in ast.walk(ast.parse((package / path).read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            receiver = ast.unparse(node.func.value).removeprefix("self.")
            keywords = tuple(each.arg for each in node.keywords if each.arg)
            call = (node.func.attr, len(node.args), keywords)
            if receiver in RECEIVERS and call not in seen:
                seen.add(call)
                yield call[0], call[1], list(keywords)


def module_texts(package: Path, name: str) -> Iterator[str]:
    """Names that a package's ``__init__`` defines or imports."""
    folder = package / name
    tree = ast.parse((folder / "__init__.py").read_text())
    yield from defined(tree)
    for node in tree.body:
        if not isinstance(node, ast.ImportFrom):
            continue
        yield from (each.asname or each.name for each in node.names)
        if node.names[0].name == "*" and node.level == 1 and node.module:
            yield from defined(ast.parse((folder / f"{node.module}.py").read_text()))


def defined(tree: ast.Module) -> Iterator[str]:
    """Functions and annotated names of a module, including those under TYPE_CHECKING."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            yield node.name
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
