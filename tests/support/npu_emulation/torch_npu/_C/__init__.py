"""The compiled half of torch-npu, as far as Python code imports it."""

from torch_npu._C import _distributed_c10d  # noqa: F401
