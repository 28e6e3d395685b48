"""Replays traces against modelled engines and links, through the code that serves."""
