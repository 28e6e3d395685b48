"""Model files: found by name or path, fetched, and read; safetensors and GGUF."""
