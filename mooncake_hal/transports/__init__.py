"""Ways of moving KV between processes. Each package's ``plugin`` offers one to the registry."""
