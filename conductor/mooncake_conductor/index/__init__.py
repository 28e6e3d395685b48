"""Which chunk of KV is held where, as far as events, snapshots and predictions say."""
