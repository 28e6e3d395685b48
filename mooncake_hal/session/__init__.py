"""Authenticated, framed sessions: the control connections of transports and of the KV side
channel."""
