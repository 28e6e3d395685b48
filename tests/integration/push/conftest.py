"""Fixtures of the push tests: a small model, and a transport with a gate."""

from __future__ import annotations

from support.pd_fixtures import gate, model, plugin_path

__all__ = ["gate", "model", "plugin_path"]
