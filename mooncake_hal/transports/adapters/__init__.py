"""Adapters: transports whose bytes are moved by a third-party transfer engine."""
