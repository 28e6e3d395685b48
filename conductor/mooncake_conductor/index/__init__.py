"""The chunk index: which instances hold which chunks, by events, snapshots and predictions."""
