"""Graphs of the CPU backend: a list of ops with their arguments, recorded once and replayed.

A decode of a small model spends as long in Python as in its kernels. A replay makes the same calls
on the same memory with no Python between them: kernels are called with the pointers of the first
time, and torch's ops run again, their results copied to where they were.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mooncake_hal.errors import CapabilityError

_EMPTY = frozenset(
    (
        torch.ops.aten.empty.memory_format,
        torch.ops.aten.empty_strided.default,
        torch.ops.aten.empty_like.default,
        torch.ops.aten.new_empty.default,
    )
)
_TO_HOST = frozenset((torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default))


class _Current(threading.local):
    """What this thread records with, while it captures."""

    recorder: OpRecorder | None = None


_current = _Current()


class OpRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch
    """Records what a thread calls while it is entered; see ``capture`` and ``record_call``."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch
        self.calls: list[Callable[[], object]] = []
        self._kept: list[object] = []  # what the kernels' pointers point to

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """To be left alone by torch's compiler, torch would import it: two seconds and 140 MiB,
        and nothing here is compiled."""
        return False

    def __torch_dispatch__(
        self,
        function: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run one of torch's ops, and note how to run it again."""
        kwargs = kwargs or {}
        if function in _TO_HOST:
            raise CapabilityError(f"{function} reads a tensor on the host: it can't be captured")
        out = function(*args, **kwargs)
        self._kept.append((args, kwargs, out))
        if function._schema.is_mutable:
            self.calls.append(partial(function, *args, **kwargs))
        elif function not in _EMPTY and not _is_view(out, (args, kwargs)):
            self.calls.append(partial(_recompute, partial(function, *args, **kwargs), out))
        return out


class ReplayGraph:
    """The kernels read the contexts' lengths from their tensor."""

    def __init__(self, recorder: OpRecorder) -> None:
        self._recorder = recorder  # whose memory the calls work on
        self._calls = tuple(recorder.calls)

    def replay(self, host_context_lens: Sequence[int] = ()) -> None:
        for call in self._calls:
            call()


def capture(run: Callable[[], None]) -> ReplayGraph:
    """Run once, and return how to run again.

    Raises:
        CapabilityError: it does what a replay can't repeat.
    """
    recorder = OpRecorder()
    _current.recorder = recorder
    try:
        with recorder:
            run()
    finally:
        _current.recorder = None
    return ReplayGraph(recorder)


def record_call(function: Callable[..., object], *args: object) -> None:
    """Call a kernel, or whatever torch does not see; a capture in progress records it."""
    function(*args)
    recorder = _current.recorder
    if recorder is not None:
        recorder.calls.append(partial(function, *args))


def refuse_capture(what: str) -> None:
    """Refuse to be captured: raises CapabilityError during a capture."""
    if _current.recorder is not None:
        raise CapabilityError(f"{what} depends on numbers of the host: it can't be captured")


def _is_view(out: Any, arguments: Any) -> bool:
    """Whether a result is memory of an argument. An op's schema can't tell: ``to`` may copy."""
    given = {x.untyped_storage().data_ptr() for x in tree_leaves(arguments) if _is_tensor(x)}
    return any(x.untyped_storage().data_ptr() in given for x in tree_leaves(out) if _is_tensor(x))


def _is_tensor(x: object) -> bool:
    return isinstance(x, Tensor) and not x.is_mkldnn  # whose memory is oneDNN's own


def _recompute(call: Callable[[], Any], out: Any) -> None:
    for old, new in zip(tree_leaves(out), tree_leaves(call()), strict=True):
        if isinstance(old, Tensor):
            old.copy_(new)
