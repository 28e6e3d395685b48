"""Everything that the documentation names exists: files, modules, pages and their sections."""

from __future__ import annotations

import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FOLDERS = (
    "mooncake_hal",
    "backends",
    "kv",
    "conductor",
    "engine",
    "proxy",
    "testing",
    "tests",
    "ci",
    "deploy",
    "docs",
)
TRACKED = [path.as_posix() for path in ROOT.rglob("*.py") if ".venv" not in path.parts]
IN_TICKS = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\]\(([^)\s]+)\)")

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def named(page: Path) -> list[str]:
    return IN_TICKS.findall(page.read_text())


@cache
def sections(page: Path) -> set[str]:
    """The anchors that a page has, as GitHub and MkDocs name them."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


@pages
def test_every_path_exists(page: Path) -> None:
    paths = [name for name in named(page) if re.fullmatch(r"[\w.*/-]+", name)]
    wanted = [path for path in paths if path.startswith(tuple(f"{f}/" for f in FOLDERS))]
    missing = [path for path in wanted if not list(ROOT.glob(path.rstrip("/")))]
    assert not missing


@pages
def test_every_partial_path_matches_a_file(page: Path) -> None:
    ends = [name for name in named(page) if re.fullmatch(r"[a-z][\w/]*\.py", name)]
    missing = [end for end in ends if not any(path.endswith(f"/{end}") for path in TRACKED)]
    assert not missing


@pages
def test_every_module_exists(page: Path) -> None:
    modules = [name for name in named(page) if re.fullmatch(r"mooncake_\w+(\.\w+)+", name)]
    modules = [name for name in modules if not name.endswith(".py")]
    missing = [name for name in modules if not _importable(name)]
    assert not missing


def _importable(name: str) -> bool:
    module, _, leaf = name.rpartition(".")
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # the last part may be a name in the module
        spec = find_spec(module)
        return spec is not None and leaf in Path(str(spec.origin)).read_text()


@pages
def test_every_link_target_exists(page: Path) -> None:
    broken = []
    for link in LINK.findall(page.read_text()):
        if "://" in link:
            continue
        file, _, section = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        if not target.exists() or (section and section not in sections(target)):
            broken.append(link)
    assert not broken


def test_pictures_are_shown_and_small() -> None:
    """``make pictures`` generates them; an unused one would become stale unnoticed."""
    shown = "".join(path.read_text() for path in (ROOT / "docs").glob("*.md"))
    for picture in (ROOT / "docs" / "pictures").iterdir():
        assert f"(pictures/{picture.name})" in shown
        assert picture.stat().st_size < 150_000, picture.name
