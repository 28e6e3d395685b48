"""The oracle: what every op means, in plain torch and float32, written to be read.

Import ``mooncake_hal.reference.ops``, which needs torch; this package does not.
"""
