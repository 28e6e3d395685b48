"""Moving KV between instances: pull and push connectors, leases, peers; no torch and no engine."""
