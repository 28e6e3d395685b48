"""The Ascend backend of mooncake-hal. This version looks for devices and has no kernels yet."""
