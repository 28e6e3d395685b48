"""What moves KV out of and into GPUs: ``cuda_ipc`` within a host, and copies to host memory."""
