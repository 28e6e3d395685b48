"""The vendors' transfer engines behind one interface, whose calls raise instead of returning codes.

Written for mooncake-transfer-engine-npu 0.3.13 and memfabric-hybrid 1.3, whose signatures
tests/contract/ascend checks. mooncake's return codes are those of its error.h and those of HIXL,
which it passes on. memfabric's are those of its smem.h, and come with a message.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, Protocol

from mooncake_hal.errors import (
    OutOfBounds,
    PeerLost,
    RegionUnknown,
    TransferError,
    TransferTimeout,
    TransportUnavailable,
)
from mooncake_hal.transport import Spans
from mooncake_hal_ascend.hccs.hccs_settings import NAME

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
    -200: (PeerLost, "the peer's engine has published no metadata"),
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
    -2006: (TransferError, "it exists already"),
    -2007: (RegionUnknown, "it does not exist"),
    -2008: (TransferError, "the engine is not started"),
    -2009: (TransferError, "it is in use"),
    -2012: (TransferError, "a part of it failed"),
    -2014: (PeerLost, "the link is down"),
    -2015: (TransferError, "a buffer is too small"),
}
MEANINGS: dict[str, Meanings] = {"mooncake": _MOONCAKE, "memfabric": _MEMFABRIC}
"""Exception and meaning of each return code, by engine."""

SERVER, CLIENT = "Prefill", "Decode"
"""memfabric's names of the end that accepts connections and the end that opens them."""


def failure(engine: str, what: str, code: int, message: str = "") -> TransferError:
    """Make the exception for a return code that is not 0.

    Args:
        engine: name of the engine.
        what: the requested operation.
        code: the return code.
        message: the engine's message, if any.
    """
    kind, meaning = MEANINGS[engine].get(code, (TransferError, "a code that is not documented"))
    detail = f": {message}" if message else ""
    return kind(f"{engine} did not {what}: {code}, {meaning}{detail}")


class VendorEngine(Protocol):
    """One engine of this process. Any thread whose current NPU is set may call it."""

    def session(self) -> str:
        """The name by which other engines address this one."""
        ...

    def register(self, address: int, nbytes: int) -> None:
        """Register NPU memory for access by peers and by this engine.

        Raises:
            TransferError: the engine refuses.
        """
        ...

    def unregister(self, address: int) -> None:
        """Unregister the memory at ``address``; raises TransferError."""
        ...

    def read(self, session: str, spans: Spans) -> None:
        """Copy from the memory of the engine ``session``, and wait until all has arrived.

        Raises:
            TransferError: not all has arrived.
        """
        ...

    def write(self, session: str, spans: Spans) -> None:
        """Copy to the memory of the engine ``session``; see ``read``."""
        ...

    def close(self) -> None:
        """Close the engine and its links."""
        ...


class MooncakeVendor:
    """Mooncake's transfer engine with the Ascend protocol, over CANN's HIXL.

    Args:
        module: the module mooncake.engine.
        host: address at which peers reach this process.

    Raises:
        TransportUnavailable: the engine does not start.
    """

    def __init__(self, module: ModuleType, host: str) -> None:
        self._engine: Any = module.TransferEngine()
        self._host = host
        code = self._engine.initialize(host, "P2PHANDSHAKE", "ascend", "")
        if code:
            raise TransportUnavailable(NAME, str(failure("mooncake", f"start on {host}", code)))

    def session(self) -> str:
        return f"{self._host}:{self._engine.get_rpc_port()}"

    def register(self, address: int, nbytes: int) -> None:
        _require("register memory", "mooncake", self._engine.register_memory(address, nbytes))

    def unregister(self, address: int) -> None:
        _require("withdraw memory", "mooncake", self._engine.unregister_memory(address))

    def read(self, session: str, spans: Spans) -> None:
        code = self._engine.batch_transfer_sync_read(session, *_lists(spans))
        _require(f"read {len(spans)} pieces", "mooncake", code)

    def write(self, session: str, spans: Spans) -> None:
        code = self._engine.batch_transfer_sync_write(session, *_lists(spans))
        _require(f"write {len(spans)} pieces", "mooncake", code)

    def close(self) -> None:
        """Drop the last reference, which ends the engine."""
        self._engine = None


class MemfabricVendor:
    """A memfabric engine, which either accepts or opens connections.

    Args:
        module: the module memfabric_hybrid.
        host: IP address at which peers reach this process.
        device: the NPU's logical number.
        serves: whether the engine accepts connections; such an engine starts no transfers itself.
        over_roce: whether bytes move over the NPUs' NICs rather than over HCCS.

    Raises:
        TransportUnavailable: the engine does not start.
    """

    def __init__(
        self, module: ModuleType, host: str, device: int, *, serves: bool, over_roce: bool
    ) -> None:
        self._module = module
        self._host = host
        self._engine: Any = module.TransferEngine()
        operation = module.TransDataOpType
        code = self._engine.initialize(
            f"tcp://{host}",
            host,
            SERVER if serves else CLIENT,
            device,
            data_op_type=operation.DEVICE_RDMA if over_roce else operation.SDMA,
            store_server_role=SERVER,
        )
        if code:
            raise TransportUnavailable(NAME, str(self._failure(f"start on {host}", code)))

    def session(self) -> str:
        return f"{self._host}:{self._engine.get_rpc_port()}"

    def register(self, address: int, nbytes: int) -> None:
        self._require("register memory", self._engine.register_memory(address, nbytes))

    def unregister(self, address: int) -> None:
        self._require("withdraw memory", self._engine.unregister_memory(address))

    def read(self, session: str, spans: Spans) -> None:
        code = self._engine.batch_transfer_sync_read(session, *_lists(spans))
        self._require(f"read {len(spans)} pieces", code)

    def write(self, session: str, spans: Spans) -> None:
        code = self._engine.batch_transfer_sync_write(session, *_lists(spans))
        self._require(f"write {len(spans)} pieces", code)

    def close(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.destroy()  # unInitialize would end every engine of the process

    def _require(self, what: str, code: int) -> None:
        if code:
            raise self._failure(what, code)

    def _failure(self, what: str, code: int) -> TransferError:
        return failure("memfabric", what, code, self._module.get_and_clear_last_err_msg().strip())


def _require(what: str, engine: str, code: int) -> None:
    if code:
        raise failure(engine, what, code)


def _lists(spans: Spans) -> tuple[list[int], list[int], list[int]]:
    return spans.local.tolist(), spans.remote.tolist(), spans.nbytes.tolist()
