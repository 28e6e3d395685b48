"""Moving KV between instances: who may read what, for how long, and how it is fetched."""
