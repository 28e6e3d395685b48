"""The instances behind the proxy: declarations and membership, health, topology, KV events."""
