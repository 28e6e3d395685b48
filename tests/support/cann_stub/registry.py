"""Replaces the emulated NPU's registry: the same reference kernels, behind the real torch-npu.

Their results must have the shapes and dtypes that torch-npu's own meta kernels predict.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

ND, NZ = 2, 29
_library = torch.library.Library("npu", "IMPL")
_Function = TypeVar("_Function", bound=Callable[..., Any])

UNKNOWN = object()

checked: Counter[str] = Counter()
"""Number of comparisons of each op with its meta kernel."""


def require(holds: bool, message: str) -> None:
    """Raise an error where the device would."""
    if not holds:
        raise RuntimeError(message)


def kernel(name: str, *, takes_nz: bool = False) -> Callable[[_Function], _Function]:
    """Register a function of host tensors as the kernel of ``npu::name``.

    Args:
        name: of the op, with its overload.
        takes_nz: whether it reads the private format NZ, which does not exist without CANN.
    """
    op = getattr(torch.ops.npu, name.partition(".")[0])
    overload = getattr(op, name.partition(".")[2] or "default")

    def register(function: _Function) -> _Function:
        @wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
            index = tensors[0].device.index or 0
            wanted = _meta(overload, args, kwargs)
            on_host = tree_map(_lower, (args, kwargs))
            made = function(*on_host[0], **on_host[1])
            _compare(name, made, wanted)
            return tree_map(lambda each: _lift(each, index), made)

        _override(name, run)
        return function

    return register


def format_cast(
    x: Tensor,
    acl_format: int,
    *,
    customize_dtype: int | None = None,
    input_dtype: int | None = None,
) -> Tensor:
    """Copy: memory formats are CANN's; without it, all memory is in plain rows."""
    require(acl_format in (ND, NZ), f"formats {ND} and {NZ} are known here, not {acl_format}")
    return x.clone()


def _override(name: str, function: Callable[..., Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about torch-npu's existing kernel
        for key in ("PrivateUse1", "AutogradPrivateUse1"):  # some have theirs for the latter
            _library.impl(name, function, key, allow_override=True)


_override("npu_format_cast", format_cast)


def _meta(overload: Any, args: Any, kwargs: Any) -> Any:
    """The result that torch-npu's meta kernel predicts; ``UNKNOWN`` if it has none."""
    shadows = tree_map(lambda x: x.to("meta") if isinstance(x, Tensor) else x, (args, kwargs))
    try:
        return overload(*shadows[0], **shadows[1])
    except NotImplementedError:
        return UNKNOWN


def _compare(name: str, made: Any, wanted: Any) -> None:
    if wanted is UNKNOWN:
        return
    found, meant = (
        [_form(x) for x in tree_leaves(value) if isinstance(x, Tensor)] for value in (made, wanted)
    )
    if found != meant:
        raise AssertionError(f"npu::{name} returns {found}, torch-npu's meta kernel {meant}")
    checked[name] += 1


def _form(tensor: Tensor) -> object:
    """The properties to compare; an output that was not requested has one element or none."""
    return (tuple(tensor.shape) if tensor.numel() > 1 else "nothing", tensor.dtype)


def _lower(value: Any) -> Any:
    return torch.ops.cann_stub.as_cpu(value) if isinstance(value, Tensor) else value


def _lift(value: Any, index: int) -> Any:
    return torch.ops.cann_stub.to_npu(value, index) if isinstance(value, Tensor) else value
