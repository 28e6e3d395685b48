"""Every error of mooncake_conductor.

ConductorError
├── ConductorConfigError   settings that can't be honoured
├── MalformedEvent         a KV event batch that can't be decoded
├── UnknownInstance        an instance that was never added, or is gone
├── InvalidTrace           a file that is no trace
└── CalibrationFailed      a live instance that can't be measured
"""

from __future__ import annotations


class ConductorError(Exception):
    """Base of everything that mooncake_conductor raises on purpose."""


class ConductorConfigError(ConductorError):
    """Settings that can't be honoured: what was wanted, what was found, what to do."""


class MalformedEvent(ConductorError):
    """A batch of KV events that can't be decoded; it costs its publisher a resync, no more."""


class UnknownInstance(ConductorError):
    """An instance that was never added, or has been removed."""


class InvalidTrace(ConductorError):
    """A file that is no trace; names the line, and what was wanted."""


class CalibrationFailed(ConductorError):
    """A live instance that can't be reached, refuses, or gives nothing to measure."""
