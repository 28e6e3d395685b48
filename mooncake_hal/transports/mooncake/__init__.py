"""The ``mooncake`` transport: mooncake-transfer-engine moves the bytes."""
