"""The exception tree of mooncake_conductor.

ConductorError
├── ConductorConfigError   settings that can't be used
├── MalformedEvent         a KV event batch that can't be decoded
├── UnknownInstance        an instance that was never added, or has been removed
├── InvalidTrace           a file that is no trace
└── CalibrationFailed      a live instance that can't be measured
"""

from __future__ import annotations


class ConductorError(Exception):
    """Base of all exceptions that mooncake_conductor raises itself."""


class ConductorConfigError(ConductorError):
    """Settings that can't be used. The message says what was wanted and what was found."""


class MalformedEvent(ConductorError):
    """A batch of KV events that can't be decoded. Its publisher is only resynchronised."""


class UnknownInstance(ConductorError):
    """An instance that was never added, or has been removed."""


class InvalidTrace(ConductorError):
    """A file that is no trace. The message names the line and what was wanted."""


class CalibrationFailed(ConductorError):
    """A live instance that can't be reached, refuses requests, or can't be measured."""
