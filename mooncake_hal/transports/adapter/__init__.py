"""Transports whose bytes are moved by somebody else's transfer engine."""
