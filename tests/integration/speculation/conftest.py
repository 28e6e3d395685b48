"""Fixtures of the speculation tests: a compute thread."""

from __future__ import annotations

from support.threads import single_thread

__all__ = ["single_thread"]
