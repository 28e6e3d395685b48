"""Transports whose bytes are moved by another transfer engine."""
