"""The peak number of bytes that tensors of this thread occupied at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class PeakBytes(TorchDispatchMode):
    """Counts the storages that ops return while they are referenced; temporaries inside an op are
    not seen."""

    def __init__(self) -> None:
        super().__init__()
        self._held: dict[int, tuple[StorageWeakRef, int]] = {}
        self.most = 0

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        self._held = {key: one for key, one in self._held.items() if not one[0].expired()}
        for leaf in tree_leaves(found):
            if isinstance(leaf, torch.Tensor):
                storage = leaf.untyped_storage()
                self._held[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.most = max(self.most, sum(nbytes for _, nbytes in self._held.values()))
        return found
