"""The shm transport, between processes of one host: a single copy, through shared mappings or with
process_vm_readv and process_vm_writev."""
