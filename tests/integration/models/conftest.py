"""What these tests share: a thread to compute in."""

from __future__ import annotations

from support.threads import single_thread

__all__ = ["single_thread"]
