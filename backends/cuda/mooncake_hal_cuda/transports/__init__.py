"""The transports of this backend: ``cuda_ipc`` within a host, ``staged`` through pinned memory."""
