"""KV over RDMA verbs: RoCE v2 and InfiniBand, one-sided, through rdma-core's pyverbs."""
