"""The rdma transport: one-sided RDMA verbs over RoCE v2 and InfiniBand, with rdma-core's libibverbs
and pyverbs."""
