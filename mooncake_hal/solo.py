"""The communicator of a group of one: nothing to do, on any backend."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mooncake_hal.errors import DeviceError

if TYPE_CHECKING:
    from torch import Tensor


class SoloCommunicator:
    """Collectives of one rank; needs no process group and no port."""

    rank = 0
    world_size = 1

    def all_reduce(self, x: Tensor) -> Tensor:
        """See ``Communicator``."""
        return x

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        """See ``Communicator``."""
        return x

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        """See ``Communicator``."""
        return x

    def send(self, x: Tensor, target: int) -> None:
        """See ``Communicator``; raises DeviceError: nobody is there."""
        raise DeviceError(f"send: there is no rank {target} in a group of one")

    def recv(self, x: Tensor, source: int) -> Tensor:
        """See ``Communicator``; raises DeviceError: nobody is there."""
        raise DeviceError(f"recv: there is no rank {source} in a group of one")

    def barrier(self) -> None:
        """See ``Communicator``."""

    def close(self) -> None:
        """See ``Communicator``."""
