"""Routing: which instance takes the next step of a request, and when a failed step is retried."""
