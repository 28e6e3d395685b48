"""Sets the version of all distributions, and of their pins on each other.

python ci/set-version.py 0.2.0     set it
python ci/set-version.py --check   fail unless all versions and pins agree
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = (".", "[!.]*", "backends/*", "integrations/*")
PROJECTS = [path for folder in FOLDERS for path in sorted(ROOT.glob(f"{folder}/pyproject.toml"))]
VERSION = re.compile(r'^version = "(?P<version>[^"]+)"$', re.MULTILINE)
NAME = re.compile(r'^name = "(?P<name>[^"]+)"$', re.MULTILINE)
NAMES = "|".join(name for project in PROJECTS for name in NAME.findall(project.read_text()))
PIN = re.compile(rf'"(?P<name>{NAMES})==(?P<version>[^"]+)"')


def versions() -> dict[str, str]:
    """Every version and pin, by location."""
    found = {}
    for project in PROJECTS:
        text = project.read_text()
        where = str(project.relative_to(ROOT))
        for match in VERSION.finditer(text):
            found[where] = match["version"]
        for match in PIN.finditer(text):
            found[f"{where}: pin on {match['name']}"] = match["version"]
    return found


def set_version(version: str) -> None:
    """Write the version everywhere."""
    for project in PROJECTS:
        text = VERSION.sub(f'version = "{version}"', project.read_text())
        project.write_text(PIN.sub(rf'"\g<name>=={version}"', text))


def main() -> int:
    """Run the command line."""
    if len(sys.argv) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    if sys.argv[1] != "--check":
        set_version(sys.argv[1])
    found = versions()
    if len(set(found.values())) != 1:
        print("versions differ:", file=sys.stderr)
        for where, version in found.items():
            print(f"  {version}  {where}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
