"""The communicator of a group of one: nothing to do, on any backend."""

from __future__ import annotations

from typing import TYPE_CHECKING

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

    def barrier(self) -> None:
        """See ``Communicator``."""

    def close(self) -> None:
        """See ``Communicator``."""
