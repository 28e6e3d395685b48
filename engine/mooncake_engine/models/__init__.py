"""Decoder architectures, written once against ``mooncake_hal.backend.Ops``."""
