"""Blocks of paged KV: who owns which, and what they hold. Pure code, plain numbers."""
