"""The CPU backend of mooncake-hal: C++ kernels where they are faster than torch, else torch."""
