"""Which steps are replayed, and in what sizes."""

from __future__ import annotations

from dataclasses import dataclass

from mooncake_engine.config import EngineConfig, Role
from mooncake_hal.backend import Backend

_MOST_PIECEWISE = 512
"""Tokens of a piecewise step on a device with memory of its own; what is larger keeps it busy while
Python launches."""


@dataclass(frozen=True, slots=True)
class GraphPlan:
    """The sizes to capture, rising; none where such steps are launched op by op.

    Args:
        decode_sizes: sequences of steps of nothing but decodes.
        piecewise_sizes: tokens of all other steps; with experts divided over ranks, of all steps.
    """

    decode_sizes: tuple[int, ...] = ()
    piecewise_sizes: tuple[int, ...] = ()

    def scratch_blocks(self, block_size: int) -> int:
        """Blocks with a slot for each token that a step may be short of.

        While graphs of decodes are captured that is every token; the others repeat slots.
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
    """What an instance captures: what its backend can, of models in one stage.

    How many tokens a rank's own experts get differs from step to step. So where experts are divided
    over ranks they are left out of the graphs, which all steps then have in pieces.
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
        tokens = 0 if is_host else _MOST_PIECEWISE
    whole = () if config.role is Role.PREFILL or is_divided else decode_sizes(decodes)
    pieces = piecewise_sizes(min(tokens, config.max_num_batched_tokens))
    if (most := backend.capabilities.max_graphs) is not None:
        whole = thinned(whole, most)
        pieces = thinned(pieces, (most - len(whole)) // (num_layers + 1))
    return GraphPlan(whole, pieces)


def decode_sizes(largest: int) -> tuple[int, ...]:
    """Sequences per graph, rising: close together where a step is short."""
    return _up_to(
        largest, [1, 2, 4, *range(8, 65, 8), *range(80, 257, 16), *range(288, largest, 32)]
    )


def piecewise_sizes(largest: int) -> tuple[int, ...]:
    """Tokens per graph, rising, an eighth to a quarter apart: each has graphs for every layer."""
    sizes = [8, 16, 24]
    for power in range(5, largest.bit_length()):
        sizes += range(1 << power, 2 << power, 1 << max(power - 2, 4))
    return _up_to(largest, sizes) if largest else ()


def thinned(sizes: tuple[int, ...], most: int) -> tuple[int, ...]:
    """At most ``most`` of the sizes, evenly chosen, the largest among them."""
    count = max(min(len(sizes), most), 0)
    return tuple(sizes[(index + 1) * len(sizes) // count - 1] for index in range(count))


def _up_to(largest: int, sizes: list[int]) -> tuple[int, ...]:
    return (*(size for size in sizes if size < largest), largest)
