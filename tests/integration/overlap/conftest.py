"""Fixtures of the async scheduling tests: a small model."""

from __future__ import annotations

from support.pd_fixtures import model

__all__ = ["model"]
