"""A backend that computes nothing: for testing schedulers, servers and connectors at full speed."""
