"""What holds for every unit test."""

from __future__ import annotations

from hypothesis import settings

# How long an example takes says how busy the machine is, nothing about the product.
settings.register_profile("any-machine", deadline=None)
settings.load_profile("any-machine")
