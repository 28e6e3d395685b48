"""The CUDA backend of mooncake-hal: NVIDIA GPUs, through torch, Triton and libcuda."""
