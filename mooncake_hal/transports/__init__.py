"""The transports of mooncake-hal. Each package's ``*_plugin`` module offers one to the registry."""
