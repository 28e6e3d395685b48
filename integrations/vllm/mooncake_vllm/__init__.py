"""Connectors of mooncake_kv inside vLLM."""
