"""Model files: locates them by name or path, downloads and reads them; safetensors and GGUF."""
