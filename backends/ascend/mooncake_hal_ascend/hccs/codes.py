"""What the engines' return codes mean, as errors of ours. Pure.

mooncake's are those of its error.h and HIXL's, which it hands through; memfabric's those of its
smem.h. It has words beside them.
"""

from __future__ import annotations

from mooncake_hal.errors import (
    OutOfBounds,
    PeerLost,
    RegionUnknown,
    TransferError,
    TransferTimeout,
)

Meanings = dict[int, tuple[type[TransferError], str]]

_MOONCAKE: Meanings = {
    -1: (TransferError, "refused; the engine's log says why"),
    -2: (TransferError, "too many requests at once"),
    -3: (RegionUnknown, "an address is not registered"),
    -6: (TransferError, "the NPU is not found; is it set in this thread?"),
    -7: (OutOfBounds, "memory overlaps what is registered"),
    -101: (PeerLost, "the peer's host name is not known"),
    -102: (PeerLost, "the peer's port does not answer"),
    -104: (PeerLost, "the peer refused the handshake"),
    -200: (PeerLost, "the peer's engine says nothing of itself"),
    -302: (TransferError, "the engine has no memory left"),
    103900: (TransferError, "parameters are refused: is all memory registered, and aligned?"),
    103901: (TransferTimeout, "the engine's own deadline passed"),
    103902: (PeerLost, "the link is down"),
    103903: (TransferError, "the link is up already"),
    103905: (TransferError, "this CANN does not support it"),
    203900: (TransferError, "the NPU has no resources left for another link"),
    503900: (TransferError, "failed; CANN's log says why"),
}
_MEMFABRIC: Meanings = {
    -1: (TransferError, "refused; the engine's log says why"),
    -2000: (TransferError, "parameters are refused: is all memory registered, the peer known?"),
    -2001: (TransferError, "the engine has no memory left"),
    -2002: (TransferError, "the engine has no resources left"),
    -2003: (TransferError, "the engine is not started"),
    -2004: (TransferTimeout, "the engine's own deadline passed"),
    -2005: (TransferError, "it was done already"),
    -2006: (TransferError, "it is there already"),
    -2007: (RegionUnknown, "it is not there"),
    -2008: (TransferError, "the engine is not started"),
    -2009: (TransferError, "it is in use"),
    -2012: (TransferError, "a part of it failed"),
    -2014: (PeerLost, "the link is down"),
    -2015: (TransferError, "a buffer is too small"),
}
MEANINGS: dict[str, Meanings] = {"mooncake": _MOONCAKE, "memfabric": _MEMFABRIC}
"""By engine."""


def failure(engine: str, what: str, code: int, words: str = "") -> TransferError:
    """Make the error of a return code that is not 0.

    Args:
        engine: which engine returned it.
        what: was asked of it.
        code: as it came.
        words: what the engine says beside it.
    """
    kind, meaning = MEANINGS[engine].get(code, (TransferError, "a code that is not documented"))
    said = f": {words}" if words else ""
    return kind(f"{engine} did not {what}: {code}, {meaning}{said}")
