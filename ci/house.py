"""Checks house style: retired words and names, ambiguous file names, sizes of files and functions.

python ci/house.py             # the rules are in ci/house.toml; part of `make check`

Prints one line per finding: file, line, what was found, what to write instead. Exits 1 if there is
any.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
PROSE = (".md", ".py", ".sh", ".toml", ".yaml", ".yml")
MAX_FILE_LINES = 600
MIN_FILE_LINES = 60
MAX_FUNCTION_LINES = 60
MAX_POSITIONAL = 6
MAX_PROSE = 120


def tracked() -> list[str]:
    """The repository's files, tracked or untracked but not ignored, as paths from its root."""
    command = ["git", "ls-files", "-co", "--exclude-standard"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return sorted(path for path in found.splitlines() if (ROOT / path).is_file())


def retired_identifiers(path: str, text: str, rules: dict[str, str]) -> Iterator[str]:
    """Find retired names in code."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.NAME and token.string in rules:
            line = token.start[0]
            yield f"{path}:{line}: {token.string!r} is retired: write {rules[token.string]}"


def retired_phrases(path: str, text: str, rules: dict[re.Pattern[str], str]) -> Iterator[str]:
    """Find retired phrases in prose and code, including test names."""
    for number, line in enumerate(text.splitlines(), 1):
        for pattern, instead in rules.items():
            if found := pattern.search(line.replace("_", " ")):
                yield f"{path}:{number}: {found.group()!r} is retired: write {instead}"


def retired_file_name(path: str, rules: dict[str, str]) -> Iterator[str]:
    """Find a file that has a retired name."""
    name = Path(path).stem.removeprefix("test_")
    if name in rules:
        yield f"{path}: {name!r} is retired: write {rules[name]}"


def file_names(paths: Iterable[str], shared: list[str]) -> Iterator[str]:
    """Find product files that share a name: a file's name must say what is in it."""
    by_name: dict[str, list[str]] = defaultdict(list)
    for path in paths:
        by_name[Path(path).name].append(path)
    for name, found in sorted(by_name.items()):
        if len(found) > 1 and name not in shared:
            yield f"{', '.join(found)}: {len(found)} files are called {name}; rename all but one"


def class_names(paths: Iterable[str], shared: dict[str, str]) -> Iterator[str]:
    """Find public classes that share a name within a distribution."""
    by_name: dict[tuple[str, str], list[str]] = defaultdict(list)
    for path in paths:
        for node in ast.parse((ROOT / path).read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                by_name[path.split("/")[0], node.name].append(path)
    repeated = {name: found for (_, name), found in by_name.items() if len(found) > 1}
    for name in sorted(repeated.keys() - shared.keys()):
        found = repeated[name]
        yield f"{', '.join(found)}: {len(found)} classes are called {name}; rename all but one"
    for name in sorted(shared.keys() - repeated.keys()):
        yield f"ci/house.toml: {name} is listed as a shared class name, but only one class has it"


def file_sizes(path: str, text: str, small: dict[str, str]) -> Iterator[str]:
    """Find a file with too few or too many lines."""
    lines = text.count("\n")
    if lines > MAX_FILE_LINES:
        yield f"{path}: {lines} lines, at most {MAX_FILE_LINES}; split it by topic"
    if lines < MIN_FILE_LINES and Path(path).name != "__init__.py" and path not in small:
        yield (
            f"{path}: {lines} lines; join it with its neighbour, or give the reason for so small "
            "a file in ci/house.toml"
        )
    if lines >= MIN_FILE_LINES and path in small:
        yield f"ci/house.toml: {path} is listed as a small file, and has {lines} lines"


def function_sizes(path: str, text: str, long: dict[str, str]) -> Iterator[str]:
    """Find functions with too many lines."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > MAX_FUNCTION_LINES and f"{path}:{node.name}" not in long:
                yield f"{path}:{node.lineno}: {node.name} has {lines} lines, at most 60"


def parameters(path: str, text: str) -> Iterator[str]:
    """Find functions with more than six positional parameters, which should be a dataclass.

    Constructors and keyword-only data may have eight in all: ruff's PLR0913 counts those.
    """
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name != "__init__":
            by_position = [a.arg for a in (*node.args.posonlyargs, *node.args.args)]
            taken = [name for name in by_position if name not in ("self", "cls")]
            if len(taken) > MAX_POSITIONAL and "kernels" not in path:
                yield f"{path}:{node.lineno}: {node.name} takes {len(taken)} by position, at most 6"


def prose_lines(path: str, text: str) -> Iterator[str]:
    """Find long lines in guides. Tables and command lines may be longer."""
    in_code = False
    for number, line in enumerate(text.splitlines(), 1):
        in_code ^= line.startswith("```")
        if len(line) > MAX_PROSE and not in_code and not line.startswith(("|", "    ")):
            yield f"{path}:{number}: {len(line)} characters, at most {MAX_PROSE}; wrap the line"


def docstrings(path: str, text: str) -> Iterator[str]:
    """Find docstrings that only refer to the interface: implementations inherit theirs."""
    for number, line in enumerate(text.splitlines(), 1):
        if re.search(r'"""See ``[^`]+``\.?"""', line):
            yield f"{path}:{number}: an implementation inherits its docstring: remove this one"


def findings(rules: dict[str, Any]) -> Iterator[str]:
    """All violations, in file order."""
    paths = tracked()
    product = [p for p in paths if p.endswith(".py") and p.startswith(tuple(rules["product"]))]
    phrases = {re.compile(p, re.IGNORECASE): w for p, w in rules["phrases"].items()}
    yield from file_names(product, rules["shared_file_names"])
    yield from class_names(product, rules["shared_class_names"])
    for stale in sorted({*rules["small_files"]} - {*paths}):
        yield f"ci/house.toml: {stale} is listed as a small file and does not exist"
    for path in paths:
        if not path.endswith(PROSE) or path.startswith(tuple(rules["exempt"])):
            continue
        text = (ROOT / path).read_text()
        yield from retired_phrases(path, text, phrases)
        if path == "README.md" or re.fullmatch(r"docs/[^/]+\.md", path):
            yield from prose_lines(path, text)
        if path.endswith(".py"):
            yield from retired_file_name(path, rules["identifiers"])
            yield from retired_identifiers(path, text, rules["identifiers"])
        if path in product:
            yield from file_sizes(path, text, rules["small_files"])
            yield from function_sizes(path, text, rules["long_functions"])
            yield from parameters(path, text)
            yield from docstrings(path, text)


def main() -> int:
    """Print all violations; returns 1 if there is any."""
    found = list(findings(tomllib.loads((ROOT / "ci" / "house.toml").read_text())))
    for line in found:
        print(line)
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
