"""OpenAI-compatible front of prefill and decode pools. Importing it starts and probes nothing."""

__version__ = "0.1.0"
