"""The ``cuda_ipc`` transport: KV from GPU to GPU of one host, by mapping the peer's memory."""
