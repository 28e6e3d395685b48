"""How one instance uses the KVCache pool: what it loads from stores, and what it saves there."""
