"""Downloads third-party package archives that tests read, and verifies their digests."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path


def fetch_archive(
    command: Sequence[str], source: str, folder: Path, *, index: str, sha256: str
) -> Path | None:
    """Download a package's archive into an empty folder with a package manager.

    Args:
        command: the command that downloads ``source`` into ``folder``, without ``source``.
        source: the package with its version.
        folder: the target folder.
        index: the index's name in messages.
        sha256: the archive's expected digest.

    Returns:
        The archive; None, with a message on standard error, if it can't be downloaded.

    Raises:
        SystemExit: the digest differs.
    """
    if subprocess.run([*command, source], stdout=sys.stderr, check=False).returncode:
        print(f"{source} can't be downloaded from {index}", file=sys.stderr)
        return None
    (archive,) = folder.iterdir()
    if hashlib.sha256(archive.read_bytes()).hexdigest() != sha256:
        raise SystemExit(f"{archive.name} differs from the tested file (wrong sha256)")
    return archive
