"""Graphs of the CPU backend: a list of ops with their arguments, recorded once and replayed.

A decode of a small model spends as much time in Python as in its kernels. A replay makes the same
calls on the same memory without the model's Python code: kernels are called with the recorded
pointers, and torch's ops run again, with their results copied to the recorded outputs.
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
    """The recorder of the capture that this thread is running, if any."""

    recorder: OpRecorder | None = None


_current = _Current()


class OpRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch
    """Records the calls that a thread makes while the recorder is entered; see ``capture`` and
    ``record_call``."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch
        self.calls: list[Callable[[], object]] = []
        self._kept: list[object] = []  # keeps the memory behind the kernels' pointers alive

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False, since True would make torch import its compiler to skip this mode there: 2 s and
        140 MiB, although nothing here is compiled."""
        return False

    def __torch_dispatch__(
        self,
        function: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run one of torch's ops, and record how to run it again."""
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
    """A captured graph. The kernels read context lengths from the recorded tensor."""

    def __init__(self, recorder: OpRecorder) -> None:
        self._recorder = recorder  # keeps the memory of the calls alive
        self._calls = tuple(recorder.calls)

    def replay(self, host_context_lens: Sequence[int] = ()) -> None:
        for call in self._calls:
            call()


def capture(run: Callable[[], None]) -> ReplayGraph:
    """Call ``run`` once, and return a graph that repeats its calls.

    Raises:
        CapabilityError: ``run`` makes a call that can't be replayed.
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
    """Call a kernel, or another function that torch does not dispatch; a capture records it."""
    function(*args)
    recorder = _current.recorder
    if recorder is not None:
        recorder.calls.append(partial(function, *args))


def refuse_capture(what: str) -> None:
    """Raise CapabilityError if this thread is running a capture."""
    if _current.recorder is not None:
        raise CapabilityError(f"{what} depends on values on the host: it can't be captured")


def _is_view(out: Any, arguments: Any) -> bool:
    """Whether a result shares memory with an argument. The op's schema does not tell: ``to`` may
    copy or not."""
    given = {x.untyped_storage().data_ptr() for x in tree_leaves(arguments) if _is_tensor(x)}
    return any(x.untyped_storage().data_ptr() in given for x in tree_leaves(out) if _is_tensor(x))


def _is_tensor(x: object) -> bool:
    return isinstance(x, Tensor) and not x.is_mkldnn  # whose memory is oneDNN's own


def _recompute(call: Callable[[], Any], out: Any) -> None:
    for old, new in zip(tree_leaves(out), tree_leaves(call()), strict=True):
        if isinstance(old, Tensor):
            old.copy_(new)
