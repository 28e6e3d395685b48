"""Defines torch-npu's ops, and registers kernels for them that compute on the host."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

ND, NZ = 2, 29
"""Memory formats, by the numbers of ACL_FORMAT_ND and ACL_FORMAT_FRACTAL_NZ."""

_device = torch.ops.npu_emulation
_Function = TypeVar("_Function", bound=Callable[..., Any])


def _define_all() -> dict[str, torch.library.Library]:
    """Define every op with the schemas of the live torch-npu of that version."""
    text = Path(__file__).parents[1].joinpath("schemas.json").read_text()
    libraries = {name: torch.library.Library(name, "DEF") for name in ("npu", "atb")}
    for schema in json.loads(text)["schemas"]:
        namespace, _, rest = schema.partition("::")
        libraries[namespace].define(rest)
    return libraries


_libraries = _define_all()


def require(holds: bool, message: str) -> None:
    """Raise an error where the device would."""
    if not holds:
        raise RuntimeError(message)


def kernel(name: str, *, takes_nz: bool = False) -> Callable[[_Function], _Function]:
    """Register a function of host tensors as the kernel of ``npu::name``.

    Args:
        name: of the op, with its overload.
        takes_nz: whether it reads the private format NZ; the emulation keeps such memory as plain
            rows and only records its format.
    """

    def register(function: _Function) -> _Function:
        @wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            index = _one_device(name, (args, kwargs), takes_nz)
            on_host = tree_map(_lower, (args, kwargs))
            made = function(*on_host[0], **on_host[1])
            return tree_map(lambda each: _lift(each, index), made)

        _libraries["npu"].impl(name, run, "PrivateUse1")
        return function

    return register


def _one_device(name: str, arguments: Any, takes_nz: bool) -> int:
    """The device of all tensors."""
    tensors = [each for each in tree_leaves(arguments) if isinstance(each, Tensor)]
    devices = sorted({str(each.device) for each in tensors})
    if len(devices) != 1:
        raise RuntimeError(
            "Expected all tensors to be on the same device, but found at least two devices, "
            f"{' and '.join(devices)}! (in npu::{name})"
        )
    formats = {int(_device.format_of(each)) for each in tensors}
    require(
        takes_nz or formats <= {ND}, f"npu::{name} would read memory of format {NZ} as plain rows"
    )
    return tensors[0].device.index or 0


def _lower(value: Any) -> Any:
    return _device.as_cpu(value) if isinstance(value, Tensor) else value


def _lift(value: Any, index: int) -> Any:
    return _device.to_npu(value, index) if isinstance(value, Tensor) else value
