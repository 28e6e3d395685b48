"""Random numbers that depend on a request's seed and the output position, and on nothing else.

Pure integer arithmetic, so that a request goes on with the same draws in another batch, on another
instance or another device.
"""

from __future__ import annotations

from enum import IntEnum


class Stream(IntEnum):
    """Numbers that share nothing, of one request at one position."""

    CHOICE = 0
    """Chooses the token."""
    GUESS = 1
    """Draws a guess at it."""
    TEST = 2
    """Decides whether the guess is kept."""


_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15  # 2**64 / golden ratio, odd: SplitMix64's increment
_SPREAD = 0xD1342543DE82EF95  # far apart seeds for the streams; 0 leaves the first one's alone


def uniform(seed: int, position: int, stream: Stream = Stream.CHOICE) -> float:
    """A number in [0, 1) with 52 random bits: a float64 times it is always less than the float64.

    SplitMix64 (Steele, Lea, Flood 2014) as a hash: output ``position`` of the stream ``seed``,
    the seed scrambled first so that neighbouring seeds share nothing.

    Args:
        seed: any integer; taken modulo 2**64.
        position: index of the output token, from 0.
        stream: what the number is for.
    """
    state = (_mix((seed ^ stream * _SPREAD) & _MASK) + (position + 1) * _GOLDEN) & _MASK
    return (_mix(state) >> 12) * 2.0**-52


def _mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)
