"""Stands in for mooncake-transfer-engine-npu, beside the emulated device."""
