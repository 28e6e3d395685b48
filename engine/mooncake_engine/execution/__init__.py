"""Running step plans on a device: pools, weights, sampling, ranks."""
