"""The ``nixl`` transport: NIXL moves the bytes."""
