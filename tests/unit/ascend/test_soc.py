"""The table of supported NPUs, and the errors for all others."""

from __future__ import annotations

import pytest

from mooncake_hal.errors import BackendUnavailable
from mooncake_hal_ascend.soc import SOCS, HccsDomain, find_soc


@pytest.mark.parametrize(
    ("version", "name", "generation", "domain"),
    [
        (220, "Ascend910B1", "A2", HccsDomain.SERVER),
        (225, "Ascend910B4-1", "A2", HccsDomain.SERVER),
        (250, "Ascend910_9391", "A3", HccsDomain.SUPER_NODE),
        (255, "Ascend910_9362", "A3", HccsDomain.SUPER_NODE),
    ],
)
def test_a2_and_a3_are_supported(
    version: int, name: str, generation: str, domain: HccsDomain
) -> None:
    found = find_soc(version, name)
    assert (found.generation, found.hccs_domain) == (generation, domain)


@pytest.mark.parametrize(
    ("version", "name", "family"),
    [
        (202, "Ascend310P3", "310P"),
        (260, "Ascend950DT", "950"),
        (104, "Ascend910A", "unknown"),
        (226, "Ascend910B9", "unknown"),
        (223, "Ascend910_9391", "A2"),
    ],
)
def test_unsupported_npus_are_rejected_by_name(version: int, name: str, family: str) -> None:
    with pytest.raises(BackendUnavailable) as caught:
        find_soc(version, name)
    assert f"device {name!r} has SoC version {version} ({family})" in caught.value.reason
    assert "A2 (ascend910b*, 220 to 225), A3 (ascend910_93*, 250 to 255)" in caught.value.reason


def test_soc_versions_are_unique() -> None:
    versions = [version for soc in SOCS for version in soc.versions]
    assert len(versions) == len(set(versions))
