"""Calibration: measures the latencies of a live instance through its API."""
