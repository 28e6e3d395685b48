"""In place of the emulated NPU's registry: the same reference kernels, behind the real torch-npu.

What they make must have the shapes and dtypes that torch-npu's own meta kernels say.
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
"""How often each op was compared with its meta kernel."""


def require(holds: bool, message: str) -> None:
    """Refuse what the device would refuse."""
    if not holds:
        raise RuntimeError(message)


def kernel(name: str, *, takes_nz: bool = False) -> Callable[[_Function], _Function]:
    """Register a function of host tensors as the kernel of ``npu::name``.

    Args:
        name: of the op, with its overload.
        takes_nz: whether it reads the private format NZ; there is none without CANN.
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
    """A copy: memory formats are CANN's, without it all memory is plain rows."""
    require(acl_format in (ND, NZ), f"formats {ND} and {NZ} are known here, not {acl_format}")
    return x.clone()


def _override(name: str, function: Callable[..., Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that torch-npu has a kernel already
        for key in ("PrivateUse1", "AutogradPrivateUse1"):  # some have theirs at the latter only
            _library.impl(name, function, key, allow_override=True)


_override("npu_format_cast", format_cast)


def _meta(overload: Any, args: Any, kwargs: Any) -> Any:
    """What torch-npu's meta kernel says that the result will look like; ``UNKNOWN`` without one."""
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
        raise AssertionError(f"npu::{name} makes {found}, torch-npu's meta kernel says {meant}")
    checked[name] += 1


def _form(tensor: Tensor) -> object:
    """What is compared; of a result that was not asked for there is one element, or none."""
    return (tuple(tensor.shape) if tensor.numel() > 1 else "nothing", tensor.dtype)


def _lower(value: Any) -> Any:
    return torch.ops.cann_stub.as_cpu(value) if isinstance(value, Tensor) else value


def _lift(value: Any, index: int) -> Any:
    return torch.ops.cann_stub.to_npu(value, index) if isinstance(value, Tensor) else value
