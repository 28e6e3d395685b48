"""OpenAI's API over an engine."""
