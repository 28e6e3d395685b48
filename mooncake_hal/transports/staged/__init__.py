"""``staged``: memory of any device through pinned memory of the host, over rdma or tcp."""
