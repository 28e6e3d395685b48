"""Runs tests/adapters in an environment with the engines; see ci/test-adapters.

First prints which transports are tested, and which guarantees they don't give. Exits with pytest's
status.
"""

from __future__ import annotations

import sys

import pytest

from mooncake_hal.registry import PluginStatus, Registry

NAMES = ("mooncake", "nixl")


def describe(registry: Registry, name: str) -> bool:
    """Print a transport's status; returns whether it can be tested."""
    rows = {row.name: row for row in registry.transport_table()}
    row = rows[name]
    print(f"{name}: {row.status.value}: {row.reason}")
    if row.status is not PluginStatus.AVAILABLE:
        return False
    if not registry.load_transport(name).can_revoke:
        print(f"{name}: does not guarantee that revoke() stops transfers in flight; not tested")
    return True


def main() -> int:
    """Run the command line."""
    registry = Registry.discover()
    if not all([describe(registry, name) for name in NAMES]):
        return 1
    sys.stdout.flush()
    return pytest.main(
        ["-q", "-p", "no:cacheprovider", "--durations=10", "tests/adapters", *sys.argv[1:]]
    )


if __name__ == "__main__":
    sys.exit(main())
