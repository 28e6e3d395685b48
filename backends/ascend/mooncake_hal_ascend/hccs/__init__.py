"""The ``hccs`` transport: NPU memory to NPU memory, moved by Ascend's transfer engines."""
