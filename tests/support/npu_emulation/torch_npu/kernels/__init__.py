"""The ops of ``torch.ops.npu``: all of torch-npu's schemas, and kernels for the ops in use here."""

from torch_npu.kernels import (  # noqa: F401
    attention,
    caches,
    distributed_experts,
    experts,
    formats,
    rows,
)
