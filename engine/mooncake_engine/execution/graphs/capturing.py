"""Graphs by size: captured once, then taken by every step that fits."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import torch

from mooncake_engine.errors import ConfigError
from mooncake_hal.errors import CapabilityError

logger = logging.getLogger(__name__)

Captured = TypeVar("Captured")


class GraphsBySize(Generic[Captured]):
    """What is captured of steps of a few sizes.

    Args:
        name: what the steps are, for messages.
        remedy: the option that leaves them as they are.
        sizes: rising.
    """

    def __init__(self, name: str, remedy: str, sizes: Sequence[int]) -> None:
        self._name = name
        self._remedy = remedy
        self._sizes = sizes
        self._captured: dict[int, Captured] = {}

    def fitting(self, count: int) -> int | None:
        """The smallest size that holds so many; None if none does."""
        return next((size for size in self._sizes if size >= count), None)

    @torch.inference_mode()
    def capture(self, make: Callable[[int], Captured]) -> None:
        """Capture all sizes now, the largest first: the others fit into its memory. Without this a
        size is captured when it is first wanted.

        Args:
            make: captures a size.

        Raises:
            ConfigError: see ``get``.
        """
        for size in reversed(self._sizes):
            self.get(size, make)
        if self._captured:
            logger.info("captured %s in sizes %s", self._name, list(self._sizes))

    def get(self, size: int, make: Callable[[int], Captured]) -> Captured | None:
        """The graphs of a size; None if this model's steps can't be captured here.

        Raises:
            ConfigError: they can't, for a reason that the backend did not foresee.
        """
        if size in self._captured or not self._sizes:
            return self._captured.get(size)
        try:
            self._captured[size] = make(size)
        except CapabilityError as exc:
            logger.warning("%s run without graphs: %s", self._name, exc)
            self._sizes = ()
            return None
        except RuntimeError as exc:
            raise ConfigError(
                f"{self._name} can't be captured in size {size}: {exc}; run them without graphs: "
                f"{self._remedy}"
            ) from exc
        return self._captured[size]
