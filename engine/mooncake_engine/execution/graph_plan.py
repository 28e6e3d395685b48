"""Decides which steps are replayed from captured graphs, and in what sizes."""

from __future__ import annotations

from dataclasses import dataclass

from mooncake_engine.config import EngineConfig, Role
from mooncake_hal.backend import Backend

_MAX_PIECEWISE_TOKENS = 512
"""The most tokens of a piecewise step on a device that is not the host. Larger steps keep the
device busy while Python launches their kernels, so graphs would not speed them up."""


@dataclass(frozen=True, slots=True)
class GraphPlan:
    """The graph sizes to capture, ascending; steps of a kind without sizes run eagerly.

    Args:
        decode_sizes: sequences per graph, for steps of decodes only.
        piecewise_sizes: tokens per graph, for all other steps, or, if experts are divided over
            ranks, for all steps.
    """

    decode_sizes: tuple[int, ...] = ()
    piecewise_sizes: tuple[int, ...] = ()

    def scratch_blocks(self, block_size: int) -> int:
        """Blocks that have a slot for each padding token of a step.

        While graphs of decodes are captured, all of their tokens are padding. Piecewise graphs may
        be captured with fewer slots, which they use repeatedly.
        """
        sizes = self.piecewise_sizes
        most = max(self.decode_sizes, default=0)
        for smaller, size in zip((0, *sizes), sizes, strict=False):
            most = max(most, size - smaller - 1, 1)
        return -(-most // block_size)


NO_GRAPHS = GraphPlan()


def plan_graphs(
    config: EngineConfig, backend: Backend, num_layers: int, *, has_experts: bool = False
) -> GraphPlan:
    """Choose the graphs that an instance captures. There are none with several pipeline stages, or
    if the backend can't capture the model.

    If experts are divided over ranks, the number of tokens that a rank's experts get differs from
    step to step. The graphs then exclude the experts, and all steps are replayed piecewise.
    """
    if not backend.capabilities.graphs or config.enforce_eager:
        return NO_GRAPHS
    is_divided = config.ep_size > 1
    if has_experts and not is_divided and not backend.capabilities.moe_graphs:
        return NO_GRAPHS
    if config.pp_size > 1:
        return NO_GRAPHS
    largest = backend.capabilities.max_decodes_per_graph or config.max_num_seqs
    decodes = min(config.max_num_seqs, largest)
    tokens = config.piecewise_graph_max_tokens
    if tokens is None:
        is_host = backend.runtime.device(config.device).type == "cpu"
        tokens = 0 if is_host else _MAX_PIECEWISE_TOKENS
    whole = () if config.role is Role.PREFILL or is_divided else decode_sizes(decodes)
    pieces = piecewise_sizes(min(tokens, config.max_num_batched_tokens))
    if (most := backend.capabilities.max_graphs) is not None:
        whole = thinned(whole, most)
        pieces = thinned(pieces, (most - len(whole)) // (num_layers + 1))
    return GraphPlan(whole, pieces)


def decode_sizes(largest: int) -> tuple[int, ...]:
    """Sequences per graph, ascending; close together for small steps, where padding costs most."""
    return _up_to(
        largest, [1, 2, 4, *range(8, 65, 8), *range(80, 257, 16), *range(288, largest, 32)]
    )


def piecewise_sizes(largest: int) -> tuple[int, ...]:
    """Tokens per graph, ascending, an eighth to a quarter apart; not closer, as each size has a
    graph for every layer."""
    sizes = [8, 16, 24]
    for power in range(5, largest.bit_length()):
        sizes += range(1 << power, 2 << power, 1 << max(power - 2, 4))
    return _up_to(largest, sizes) if largest else ()


def thinned(sizes: tuple[int, ...], most: int) -> tuple[int, ...]:
    """At most ``most`` of the sizes, evenly spread, the largest included."""
    count = max(min(len(sizes), most), 0)
    return tuple(sizes[(index + 1) * len(sizes) // count - 1] for index in range(count))


def _up_to(largest: int, sizes: list[int]) -> tuple[int, ...]:
    return (*(size for size in sizes if size < largest), largest)
