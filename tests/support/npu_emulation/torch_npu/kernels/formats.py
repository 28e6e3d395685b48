"""Private memory formats: recorded, but not applied; see ``registry.kernel``."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_npu.kernels.registry import ND, NZ, _libraries, require

_device = torch.ops.npu_emulation


def format_cast(
    x: Tensor,
    acl_format: int,
    *,
    customize_dtype: int | None = None,
    input_dtype: int | None = None,
) -> Tensor:
    require(acl_format in (ND, NZ), f"the emulation knows formats {ND} and {NZ}")
    require(
        acl_format == ND or x.dtype in (torch.float16, torch.bfloat16, torch.int8),
        f"NZ holds float16, bfloat16 or int8, not {x.dtype}",
    )
    require(x.dim() >= 2, "NZ has at least two dimensions")
    index = x.device.index or 0
    copied = _device.to_npu(_device.as_cpu(x).contiguous().clone(), index)
    _device.set_format(copied, acl_format)
    return copied


def get_format(x: Tensor) -> int:
    return int(_device.format_of(x))


_libraries["npu"].impl("npu_format_cast", format_cast, "PrivateUse1")
_libraries["npu"].impl("get_npu_format", get_format, "PrivateUse1")
