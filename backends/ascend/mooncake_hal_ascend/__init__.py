"""The Ascend backend of mooncake-hal: NPUs of the families A2 and A3, through torch-npu."""
