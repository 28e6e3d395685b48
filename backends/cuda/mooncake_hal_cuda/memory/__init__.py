"""GPU memory that other processes can map: its kinds, and the allocations of KV."""
