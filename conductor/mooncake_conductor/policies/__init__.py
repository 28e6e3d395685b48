"""How a prefill instance is chosen: one short file per family, all on the same state."""
