"""The KVCache pool's node store: KV that outlives its request, in host memory and on SSDs."""
