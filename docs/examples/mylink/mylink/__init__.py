"""A transport that is an example: see docs/transfer.md."""
