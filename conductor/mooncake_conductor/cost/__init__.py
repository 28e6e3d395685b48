"""What things cost, in seconds: prefill, loads, transfers, decode steps."""
