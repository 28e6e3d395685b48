"""Checks that a loaded backend implements ``mooncake_hal.backend``.

A plugin that was written for an older contract lacks the methods that were added since. Without
this check, the first request that needs one of them would fail. Only signatures are checked here;
the conformance suite in ``mooncake_hal.testing`` checks what the methods compute.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

from mooncake_hal.backend import (
    Backend,
    Capabilities,
    Memory,
    Ops,
    Runtime,
    SamplingOps,
    ScaledKVOps,
)
from mooncake_hal.fp8_linear import Fp8ExpertOps, Fp8LinearOps
from mooncake_hal.latents import NativeLatentOps
from mooncake_hal.rope_writes import RopeWriteOps


def find_violations(backend: object) -> list[str]:
    """Return every way in which the backend deviates from the contract; empty if it conforms."""
    lacking = [f"no {name}" for name in _members(Backend) if not hasattr(backend, name)]
    if lacking:
        return lacking
    capabilities = getattr(backend, "capabilities", None)
    if not isinstance(capabilities, Capabilities):
        return [f"capabilities of type {type(capabilities).__name__}, wanted Capabilities"]
    found = [
        breach
        for part, protocol in _parts(capabilities)
        for breach in _breaches(part, getattr(backend, part), protocol)
    ]
    return list(dict.fromkeys(found))  # protocols share members


def _parts(capabilities: Capabilities) -> Iterator[tuple[str, type]]:
    yield "runtime", Runtime
    yield "memory", Memory
    yield "ops", Ops
    if capabilities.sampling:
        yield "ops", SamplingOps
    if capabilities.kv_dtypes:
        yield "ops", ScaledKVOps
    if capabilities.native_latents:
        yield "ops", NativeLatentOps
    if capabilities.fused_rope_writes:
        yield "ops", RopeWriteOps
    if "fp8" in capabilities.quantization:
        yield "ops", Fp8LinearOps
    if "fp8_experts" in capabilities.quantization:
        yield "ops", Fp8ExpertOps


def _breaches(part: str, held: object, protocol: type) -> Iterator[str]:
    for name, wanted in _members(protocol).items():
        method = getattr(held, name, None)
        parameters = list(inspect.signature(wanted).parameters)[1:]
        if not callable(method):
            yield f"no {part}.{name}"
        elif not _takes(method, len(parameters)):
            yield f"{part}.{name} does not accept the arguments ({', '.join(parameters)})"


def _members(protocol: type) -> dict[str, Any]:
    """A protocol's public members, inherited ones included, by name."""
    return {name: getattr(protocol, name) for name in dir(protocol) if not name.startswith("_")}


def _takes(method: Callable[..., object], count: int) -> bool:
    """Whether the method accepts that many positional arguments; assumed of a compiled function
    that has no signature."""
    try:
        inspect.signature(method).bind(*[None] * count)
    except TypeError:
        return False
    except ValueError:
        return True
    return True
