"""One process and its workers: metrics, logs, spans, start and stop."""
