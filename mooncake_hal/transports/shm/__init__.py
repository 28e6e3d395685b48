"""The shm transport, between processes of one host: one copy, through mappings or system calls."""
