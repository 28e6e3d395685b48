"""KV between processes of one host: one copy, by mapping or by process_vm_readv and writev."""
