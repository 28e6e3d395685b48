"""The ops of ``torch.ops.npu``: every schema of torch-npu, kernels for those that are used here."""

from torch_npu.kernels import attention, caches, experts, formats, rows  # noqa: F401
