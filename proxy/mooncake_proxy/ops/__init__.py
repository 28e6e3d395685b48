"""Operation of the proxy's processes: workers and their link, metrics, logs, tracing, shutdown."""
