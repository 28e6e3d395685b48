"""Generates the parts of the documentation that derive from the code.

python ci/docs_pages.py            # rewrite them
python ci/docs_pages.py --check    # exit 1 if one is out of date; part of `make check`

docs/code-map.md gets a table of files per folder, from the docstrings of packages and modules.
docs/options.md gets the options of `mooncake-engine serve` and `mooncake-kv store`, from the fields
that declare them, and those of `mooncake-proxy`, from its parser.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
MARK = "<!-- below this line: written by ci/docs_pages.py -->\n"
PRODUCT = [
    "api/mooncake_api",
    "mooncake_hal",
    "backends",
    "kv",
    "conductor",
    "engine",
    "proxy",
    "testing",
    "integrations",
]


def first_sentence(path: Path) -> str:
    """The first sentence of a module's docstring, on one line."""
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    paragraph = " ".join(text.split("\n\n")[0].split())
    return re.split(r"\. (?=[A-Z``])", paragraph)[0].rstrip(".").replace("|", "\\|")


def tables() -> str:
    """A heading for each folder and a row for each file, in tree order."""
    command = ["git", "ls-files", "-co", "--exclude-standard", "--", *PRODUCT]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    found = (Path(line) for line in listed.splitlines() if line.endswith(".py"))
    paths = sorted(found, key=lambda path: (path.parent, path.name))
    parts = []
    for folder, files in groupby(
        (path for path in paths if (ROOT / path).is_file()), key=lambda path: path.parent
    ):
        package = ROOT / folder / "__init__.py"
        about = first_sentence(package) if package.exists() else ""
        rows = [
            f"| `{path.name}` | {first_sentence(ROOT / path)} |"
            for path in files
            if path.name not in ("__init__.py", "__main__.py")
        ]
        if rows:
            sentence = f"{about}.\n\n" if about else ""
            parts.append(f"### `{folder}/`\n\n{sentence}| file | content |\n|---|---|\n")
            parts.append("\n".join(rows) + "\n\n")
    return "".join(parts).rstrip("\n") + "\n"


def options() -> str:
    """The options of ``mooncake-engine serve``, ``mooncake-kv store`` and ``mooncake-proxy``."""

    def printed(*command: str) -> str:
        whole = [sys.executable, "-m", *command]
        return subprocess.run(whole, cwd=ROOT, capture_output=True, text=True, check=True).stdout

    engine = printed("mooncake_engine", "options", "serve")
    store = printed("mooncake_kv", "options")
    return (
        f"{engine.rstrip()}\n\n## `mooncake-kv store`\n\n{store.rstrip()}\n\n"
        f"## `mooncake-proxy`\n\n{proxy_options()}\n"
    )


def proxy_options() -> str:
    """A table of the proxy's options. Its parser is plain argparse, because the proxy does not
    depend on the hardware layer, which declares the other programs' options."""
    from mooncake_proxy.proxy_options import build_parser

    rows = ["| option | default | meaning |", "|---|---|---|"]
    for action in build_parser()._actions:
        if action.nargs == 0 and action.dest in ("help", "version"):
            continue
        value = "\\|".join(action.choices) if action.choices else action.metavar
        text, _, said = (action.help or "").partition(" (default: ")
        default = said.rstrip(")") or ("off" if action.nargs == 0 else _plain(action.default))
        flag, *aliases = action.option_strings
        names = ", ".join([f"`{flag} {value}`" if value else f"`{flag}`", *map(_code, aliases)])
        rows.append(f"| {names} | {default} | {text} |")
    return "\n".join(rows)


def _code(text: str) -> str:
    return f"`{text}`"


def _plain(default: object) -> str:
    """A default value as the help shows it; empty if there is none."""
    if default is None or default == []:
        return ""
    return f"{default:g}" if isinstance(default, float) else str(default)


def main(arguments: list[str]) -> int:
    """Rewrite the pages, or with ``--check`` print those that are out of date."""
    status = 0
    for page, write in ((DOCS / "code-map.md", tables), (DOCS / "options.md", options)):
        written, mark, _ = page.read_text().partition(MARK)
        wanted = f"{written}{mark}\n{write()}"
        if wanted == page.read_text():
            continue
        if "--check" in arguments:
            print(f"{page.relative_to(ROOT)} is out of date: run python ci/docs_pages.py")
            status = 1
        else:
            page.write_text(wanted)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
