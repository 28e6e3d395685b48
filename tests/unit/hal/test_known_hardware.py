"""The constants known of absent hardware equal what the backends report when present."""

from __future__ import annotations

from mooncake_hal.known_hardware import ASCEND, CPU, CUDA, KNOWN_HARDWARE, HardwareInfo
from mooncake_hal.registry import Registry
from mooncake_hal.specs import TransportConstraints
from mooncake_hal_ascend.soc import SOCS
from mooncake_hal_cuda import cuda_backend, launch_tuning

REGISTRY = Registry.discover()


def constraints(hardware: HardwareInfo) -> dict[str, TransportConstraints]:
    """Return the constraints of the installed transport plugins with the same names."""
    return {name: REGISTRY.transports[name][0].constraints for name in hardware.transports}


def test_known_constraints_equal_those_of_the_plugins() -> None:
    for hardware in KNOWN_HARDWARE.values():
        assert hardware.transports == constraints(hardware)


def test_cpu() -> None:
    found = REGISTRY.select_backend("cpu").capabilities
    assert (CPU.block_sizes, tuple(CPU.transports)) == (found.block_sizes, found.transports)


def test_cuda() -> None:
    assert {*CUDA.generations} == {*launch_tuning.SHARED_BYTES}
    assert CUDA.block_sizes == cuda_backend.BLOCK_SIZES
    assert tuple(CUDA.transports) == cuda_backend.TRANSPORTS


def test_ascend() -> None:
    assert ASCEND.generations == tuple(soc.generation for soc in SOCS)
    assert {soc.block_size for soc in SOCS} == set(ASCEND.block_sizes)


def test_known_hardware_is_found_by_backend_name() -> None:
    assert REGISTRY.known_hardware("ascend") is ASCEND
    assert Registry().known_hardware("ascend") is ASCEND
    assert REGISTRY.known_hardware("null") is None
