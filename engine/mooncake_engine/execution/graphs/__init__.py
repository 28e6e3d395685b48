"""Captured work in place of hundreds of launches: what is captured, and how a step runs on it."""
