"""KV over TCP: one-sided reads and writes, several connections per peer, optional TLS."""
