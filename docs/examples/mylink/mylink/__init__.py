"""Example transport of mooncake-hal; see docs/hardware.md."""
