"""Sets up the CANN stub before a test module imports torch-npu; see ci/test-ascend-contract."""

from support import vendor_npu  # noqa: F401  # importing it sets it up
