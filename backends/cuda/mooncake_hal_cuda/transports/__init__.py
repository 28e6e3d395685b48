"""Moves KV between GPUs of a host (``cuda_ipc``), and between GPU and host memory."""
