"""The HTTP server: the OpenAI API over an engine."""
