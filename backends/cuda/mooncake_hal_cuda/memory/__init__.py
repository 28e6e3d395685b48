"""GPU memory that other processes can map: memory kinds, and allocation of KV memory."""
