"""Files that are read again while the proxy runs: the keys, and the TLS certificate.

Every process looks at them from time to time, and reads them at once at SIGHUP. What can't be used
changes nothing.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from mooncake_proxy.api.api_keys import KeyFile, read_key_file, read_keys
from mooncake_proxy.config import ProxyConfig, RequestClass
from mooncake_proxy.errors import ConfigError

logger = logging.getLogger(__name__)
LOOK_S = 5.0

Stamps = tuple[tuple[int, ...] | None, ...]
"""What tells a file from an earlier state of it, by file; None for one that is absent."""


def stamps_of(*paths: str | None) -> Stamps:
    """The present stamps of these files."""
    return tuple(None if path is None else _stamp(path) for path in paths)


def _stamp(path: str) -> tuple[int, ...] | None:
    try:
        found = os.stat(path)  # of a link's target: Kubernetes swaps a link to change a Secret
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino, found.st_dev


class ReloadedFiles:
    """Files that are read together.

    Args:
        what: what is read from them, for messages.
        paths: the files.
        read: reads them and applies their content; raises ConfigError if it can't be used.
        loaded: their stamps before they were read at the start.
    """

    def __init__(
        self, what: str, paths: tuple[str | None, ...], read: Callable[[], None], loaded: Stamps
    ) -> None:
        self._what = what
        self._paths = paths
        self._read = read
        self._loaded = self._seen = loaded

    def look(self) -> None:
        """Read the files if they have changed, but not since the last call: a certificate and its
        key, for one, are not written at the same moment."""
        now = stamps_of(*self._paths)
        if now == self._seen and now != self._loaded:
            self.reload()
        self._seen = now

    def reload(self) -> None:
        """Read the files now, if there are any."""
        if not any(self._paths):
            return
        self._loaded = stamps_of(*self._paths)
        try:
            self._read()
        except ConfigError as exc:
            logger.warning("%s not reloaded, the former stay in use: %s", self._what, exc)
        else:
            logger.info("%s reloaded", self._what)


def with_current_keys(config: ProxyConfig) -> ProxyConfig:
    """The configuration with the keys that its files hold now.

    Raises:
        ConfigError: a file can't be used.
    """
    files = config.key_files
    changes: dict[str, Any] = {}
    stamps = stamps_of(files.api, files.admin)
    if files.api is not None:
        found = read_key_file(files.api)
        changes |= {"api_keys": found.accepted, "tenants": found.tenants}
        _warn_of_changed_classes(config, found)
    if files.admin is not None:
        changes["admin_keys"] = read_keys(files.admin)
    return replace(config, key_files=replace(files, stamps=stamps), **changes)


def classes_of(key_file: KeyFile) -> list[RequestClass]:
    """The request classes that a keys file declares."""
    return [
        RequestClass(name, str(each.ttft), str(each.tbt), each.best_effort)
        for name, each in key_file.classes.items()
    ]


def _warn_of_changed_classes(config: ProxyConfig, found: KeyFile) -> None:
    conductor = config.conductor
    changed = [c.name for c in classes_of(found) if conductor and c not in conductor.classes]
    if changed:
        logger.warning(
            "key file %s: class %s has changed, which takes effect at the next start",
            config.key_files.api,
            ", ".join(changed),
        )
