"""``mooncake-engine bench``: replays a trace of requests against any OpenAI endpoint. No torch."""
