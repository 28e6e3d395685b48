"""HTTP/1.1 on asyncio protocols with a C parser: the hot path of both sides."""
