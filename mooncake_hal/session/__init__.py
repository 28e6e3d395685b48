"""One authenticated, framed session: what transports and side channels say to their peers."""
