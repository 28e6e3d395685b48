"""Geometry, layouts and transfer plans of paged KV: plain numbers, no tensors."""
