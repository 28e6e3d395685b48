"""The CPU backend of mooncake-hal: torch where torch is best, small C++ kernels where it is not."""
