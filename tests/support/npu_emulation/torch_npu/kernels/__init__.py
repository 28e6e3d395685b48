"""The ops of ``torch.ops.npu``: every schema of torch-npu, kernels for those that are used here."""

from torch_npu.kernels import (  # noqa: F401
    attention,
    caches,
    distributed_experts,
    experts,
    formats,
    rows,
)
