"""Example backend of mooncake-hal for a fictional chip, which the host simulates."""
