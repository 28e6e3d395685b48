"""Runs step plans on devices: executors and ranks, weights, graphs, sampling, drafts."""
