"""Steps with prompts, replayed in pieces: all but attention, which has its own way with a batch.

What a layer does besides attending depends on the number of tokens alone. So there are graphs for a
few numbers of tokens, one from each layer's attention to the next one's, and attention is launched
between them, over the tokens that there are (as vLLM's piecewise CUDA graphs do).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from torch import Tensor

from mooncake_engine.execution.graphs.replayed_stage import ReplayedStage
from mooncake_engine.execution.kv_pool import KVPool
from mooncake_engine.execution.model_stage import Stage
from mooncake_engine.models.catalog import Model
from mooncake_engine.models.context import ForwardContext
from mooncake_engine.models.decoder import Between
from mooncake_engine.models.layers import Placement
from mooncake_hal.backend import Graph, Runtime


class _Pieces(NamedTuple):
    """A captured step: a graph before each layer's attention and one behind the last, which leaves
    its [tokens, hidden] in ``hidden``."""

    graphs: list[Graph]
    hidden: Tensor


class PiecewiseGraphs(ReplayedStage[_Pieces]):
    """A stage whose steps with prompts are replayed in pieces, and so are steps that somebody
    listens to.

    Queries and what they attended to cross from graphs to attention and back in buffers: the memory
    of a graph's own results is another graph's by then.

    Args:
        stage: runs all other steps.
        model: the whole model, which the pieces are of.
        placement: the model's.
        pool: its KV, which ends with a scratch slot for each token that a step may be short of.
        runtime: captures.
        sizes: tokens per step, rising.
    """

    name = "steps with prompts"
    remedy = "--piecewise-graph-max-tokens 0"

    def __init__(  # the model twice: whole, and what it is made of
        self,
        stage: Stage,
        model: Model,
        placement: Placement,
        pool: KVPool,
        runtime: Runtime,
        *,
        sizes: Sequence[int],
    ) -> None:
        super().__init__(stage, pool, runtime, sizes)
        self._model = model
        most, widths = sizes[-1], model.attention_widths
        self._query = placement.zeros(most, widths.heads, widths.query)
        self._attended = placement.zeros(most, widths.heads, widths.value)

    def _takes(self, count: int, context: ForwardContext) -> bool:
        return context.batch.num_decodes < count or context.layer_done is not None

    def _replay(self, captured: _Pieces, size: int, count: int, context: ForwardContext) -> Tensor:
        query, attended = self._query[:count], self._attended[:count]
        first, *others = captured.graphs
        first.replay()
        for index, graph in enumerate(others):
            attended.copy_(self._model.attend(index, query, context))
            graph.replay()
        return captured.hidden[:count]

    def _capture(self, size: int) -> _Pieces:
        """The pieces of a step of that many tokens.

        Each is captured while the residual that it goes on with is still held, and so has memory of
        its own in the graphs' pool.
        """
        model, inputs = self._model, self._inputs
        query, attended = self._query[:size], self._attended[:size]
        places = model.place(inputs.positions[:size], inputs.slots[:size], self._kv)
        graph, between = self._piece(partial(model.begin, inputs.token_ids[:size], places), query)
        graphs, last = [graph], model.num_held_layers - 1
        for index in range(model.num_held_layers):
            run = partial(model.go_on, index, attended, between.residual, places)
            graph, between = self._piece(run, None if index == last else query)
            graphs.append(graph)
        return _Pieces(graphs, between.rows)

    def _piece(self, run: Callable[[], Between], query: Tensor | None) -> tuple[Graph, Between]:
        """A graph of ``run``, and where it leaves what it returns: queries in ``query``."""
        left: list[Between] = []

        def keep() -> None:
            between = run()
            if query is not None:
                between = between._replace(rows=query.copy_(between.rows))
            left[:] = [between]

        graph = self._runtime.capture(keep)
        return graph, left[0]
