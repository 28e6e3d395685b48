"""Settings of all unit tests."""

from __future__ import annotations

from hypothesis import settings

# An example's duration depends on the machine's load, not on the product: no deadline.
settings.register_profile("any-machine", deadline=None)
settings.load_profile("any-machine")
