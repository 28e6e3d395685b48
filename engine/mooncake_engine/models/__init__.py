"""Decoder architectures, written once for all backends, on ``mooncake_hal.backend.Ops``."""
