"""A transport that is an example: see docs/hardware.md."""
