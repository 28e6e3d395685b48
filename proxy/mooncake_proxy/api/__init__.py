"""The client side of the proxy: routes, OpenAI bodies, API keys, admission, error responses."""
