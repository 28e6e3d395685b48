"""The ``staged`` transport: memory of any device by way of pinned host memory, over rdma or tcp."""
