"""Random numbers that depend on a request's seed and the output position, and on nothing else.

Pure integer arithmetic, so that a request goes on with the same draws in another batch, on another
instance or another device.
"""

from __future__ import annotations

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15  # 2**64 / golden ratio, odd: SplitMix64's increment


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) with 52 random bits: a float64 times it is always less than the float64.

    SplitMix64 (Steele, Lea, Flood 2014) as a hash: output ``position`` of the stream ``seed``,
    the seed scrambled first so that neighbouring seeds share nothing.

    Args:
        seed: any integer; taken modulo 2**64.
        position: index of the output token, from 0.
    """
    state = (_mix(seed & _MASK) + (position + 1) * _GOLDEN) & _MASK
    return (_mix(state) >> 12) * 2.0**-52


def _mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)
