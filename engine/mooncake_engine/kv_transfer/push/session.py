"""One request's KV on its way out, seen by one rank: which layers of which tokens are due.

A step computes a range of tokens, layer after layer. Each layer is due as soon as its hook has
fired; what no hook spoke of is due when the step is over. A request that starts over (after
preemption) sends everything again: its blocks may have been somebody else's in between.
Pure: knows tokens and layers, moves nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Portion:
    """Layers of tokens that may be sent.

    Args:
        pass_number: of the pass over the prompt that computed them; a later pass replaces it.
        tokens: half-open range of positions.
        layers: half-open range of the model's layers.
        block_ids: the request's table when they were computed.
    """

    pass_number: int
    tokens: tuple[int, int]
    layers: tuple[int, int]
    block_ids: tuple[int, ...]


@dataclass(slots=True)
class _Step:
    tokens: tuple[int, int]
    block_ids: tuple[int, ...]
    missing: set[int]


@dataclass(slots=True)
class PromptProgress:
    """What has become due of one request.

    Args:
        layers: half-open range of the model's layers that this rank has.
    """

    layers: tuple[int, int]
    pass_number: int = 0
    _block_ids: list[int] = field(default_factory=list)
    _num_due: int = 0  # tokens before this one are due in all layers
    _step: _Step | None = None

    def begin_pass(self, block_ids: Iterable[int]) -> None:
        """The request begins to run, or starts over: forget what was due."""
        self.pass_number += 1
        self._block_ids = list(block_ids)
        self._num_due = 0
        self._step = None

    def begin_step(self, stop: int, new_block_ids: Iterable[int]) -> list[Portion]:
        """A step runs the tokens before ``stop``; returns what the last one left.

        Tokens before the step's first, found in the prefix cache, become due with it.
        """
        left = self.end_step()
        self._block_ids.extend(new_block_ids)
        if stop > self._num_due:
            self._step = _Step(
                (self._num_due, stop), tuple(self._block_ids), set(range(*self.layers))
            )
            self._num_due = stop
        return left

    def layer_done(self, layer: int) -> Portion | None:
        """The step's KV of that layer is written; None if it is known already."""
        step = self._step
        if step is None or layer not in step.missing:
            return None
        step.missing.remove(layer)
        return Portion(self.pass_number, step.tokens, (layer, layer + 1), step.block_ids)

    def end_step(self) -> list[Portion]:
        """The step is over: what no hook spoke of is due now."""
        step, self._step = self._step, None
        if step is None:
            return []
        return [
            Portion(self.pass_number, step.tokens, layers, step.block_ids)
            for layers in _runs(sorted(step.missing))
        ]

    def end_pass(self, stop: int, block_ids: Iterable[int]) -> list[Portion]:
        """All tokens before ``stop`` are computed; returns all that was not yet due."""
        left = self.end_step()
        if self._num_due < stop:
            tokens = (self._num_due, stop)
            left.append(Portion(self.pass_number, tokens, self.layers, tuple(block_ids)))
            self._num_due = stop
        return left


def merge_portions(portions: Iterable[Portion]) -> list[Portion]:
    """Join portions of the same tokens whose layers follow each other: fewer, larger transfers."""
    merged: list[Portion] = []
    for portion in portions:
        last = merged[-1] if merged else None
        if last is not None and _continues(last, portion):
            merged[-1] = Portion(
                last.pass_number, last.tokens, (last.layers[0], portion.layers[1]), last.block_ids
            )
        else:
            merged.append(portion)
    return merged


def _continues(last: Portion, portion: Portion) -> bool:
    return (
        last.pass_number == portion.pass_number
        and last.tokens == portion.tokens
        and last.layers[1] == portion.layers[0]
    )


def _runs(layers: list[int]) -> list[tuple[int, int]]:
    """Sorted layer indices as half-open ranges."""
    runs: list[tuple[int, int]] = []
    for layer in layers:
        if runs and runs[-1][1] == layer:
            runs[-1] = (runs[-1][0], layer + 1)
        else:
            runs.append((layer, layer + 1))
    return runs
