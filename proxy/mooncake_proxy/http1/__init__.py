"""HTTP/1.1 server and client on asyncio protocols with a C parser: the proxy's hot path."""
