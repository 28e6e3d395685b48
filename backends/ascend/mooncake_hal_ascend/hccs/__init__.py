"""The ``hccs`` transport: moves NPU memory to NPU memory with Ascend's transfer engines."""
