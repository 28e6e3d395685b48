"""Places experts, and replicas of busy ones, on ranks, balanced by the tokens of each expert.

The algorithm of DeepSeek's expert-parallel load balancer (EPLB, described in arXiv 2412.19437,
3.4.2). A slot holds one expert on one rank; if there are more slots than experts, the busiest
experts have several slots. Pure functions of plain numbers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ExpertRanks:
    """The ranks that experts are divided over.

    Args:
        ranks: number of equal parts that slots are divided into; a multiple of ``nodes``.
        nodes: number of hosts, each with equally many ranks.
        groups: number of groups of consecutive experts, of equal size, of which a token chooses
            some (DeepSeek-V3). If they can be divided over nodes, each group stays on one node.
    """

    ranks: int
    nodes: int = 1
    groups: int = 1

    @property
    def is_hierarchical(self) -> bool:
        """Whether groups are divided over nodes first; else experts go to all ranks at once."""
        return self.groups % self.nodes == 0


def place_experts(loads: Sequence[float], num_slots: int, over: ExpertRanks) -> tuple[int, ...]:
    """Choose the expert in each slot of a layer. The slots of a rank are consecutive, in rank
    order.

    Args:
        loads: number of tokens of each expert.
        num_slots: number of slots: at least the number of experts, and a multiple of ``ranks``.
        over: see ``ExpertRanks``.
    """
    nodes = over.nodes if over.is_hierarchical else 1
    groups = over.groups if over.is_hierarchical else 1
    size = len(loads) // groups
    group_loads = [sum(loads[group * size : (group + 1) * size]) for group in range(groups)]
    slots: list[int] = []
    for packed in pack_evenly(group_loads, nodes):
        experts = [group * size + index for group in packed for index in range(size)]
        replicas = replicate([loads[expert] for expert in experts], num_slots // nodes)
        counts = [replicas.count(index) for index in range(len(experts))]
        shares = [loads[experts[index]] / counts[index] for index in replicas]
        for pack in pack_evenly(shares, over.ranks // nodes):
            slots += [experts[replicas[item]] for item in pack]
    return tuple(slots)


def pack_evenly(weights: Sequence[float], num_packs: int) -> list[list[int]]:
    """Divide items into packs of equal size: the heaviest item goes first, and each goes into the
    lightest pack that is not full."""
    size = len(weights) // num_packs
    if size == 1:
        return [[item] for item in range(len(weights))]
    packs: list[list[int]] = [[] for _ in range(num_packs)]
    totals = [0.0] * num_packs
    for item in sorted(range(len(weights)), key=lambda item: -weights[item]):
        open_packs = (pack for pack in range(num_packs) if len(packs[pack]) < size)
        lightest = min(open_packs, key=totals.__getitem__)
        packs[lightest].append(item)
        totals[lightest] += weights[item]
    return packs


def replicate(loads: Sequence[float], num_slots: int) -> list[int]:
    """Fill slots with every expert once, then repeatedly with the expert that has the highest load
    per replica."""
    slots, counts = list(range(len(loads))), [1] * len(loads)
    while len(slots) < num_slots:
        busiest = max(range(len(loads)), key=lambda expert: loads[expert] / counts[expert])
        slots.append(busiest)
        counts[busiest] += 1
    return slots


def reduce_moves(wanted: Sequence[int], slots: Sequence[int], num_ranks: int) -> tuple[int, ...]:
    """Rearrange a placement so that fewer experts have to move: each rank gets the pack of which it
    already holds most, and keeps experts in their slots. As ranks are alike, the balance is the
    same.

    Args:
        wanted: the result of ``place_experts``.
        slots: the current expert in each slot.
        num_ranks: number of ranks that the slots are divided over.
    """
    size = len(slots) // num_ranks
    present = [Counter(slots[first : first + size]) for first in range(0, len(slots), size)]
    packs = [Counter(wanted[first : first + size]) for first in range(0, len(slots), size)]
    pairs = [(rank, pack) for rank in range(num_ranks) for pack in range(num_ranks)]
    pairs.sort(key=lambda pair: -(present[pair[0]] & packs[pair[1]]).total())
    chosen: dict[int, Counter[int]] = {}
    taken: set[int] = set()
    for rank, pack in pairs:
        if rank not in chosen and pack not in taken:
            chosen[rank] = packs[pack]
            taken.add(pack)
    rearranged: list[int] = []
    for rank in range(num_ranks):
        left = chosen[rank].copy()
        kept = []
        for expert in slots[rank * size : (rank + 1) * size]:
            stays = left[expert] > 0
            left[expert] -= stays
            kept.append(expert if stays else None)
        coming = iter(left.elements())
        rearranged += [next(coming) if expert is None else expert for expert in kept]
    return tuple(rearranged)


@dataclass(frozen=True, slots=True)
class ExpertMove:
    """A copy of the weights in slot ``source`` of the old placement to slot ``target`` of the new
    one."""

    source: int
    target: int


def plan_moves(
    before: Sequence[int], after: Sequence[int], num_ranks: int
) -> tuple[ExpertMove, ...]:
    """The moves that turn one placement into another. The source of an expert is on the same rank
    if that rank holds it, else on the rank that sends the fewest experts so far."""
    size = len(before) // num_ranks
    held: dict[int, list[int]] = {}
    for slot, expert in enumerate(before):
        held.setdefault(expert, []).append(slot)
    given: Counter[int] = Counter()  # by rank
    moves = []
    for target, expert in enumerate(after):
        if before[target] == expert:
            continue
        rank = target // size
        own = [slot for slot in held[expert] if slot // size == rank]
        source = own[0] if own else min(held[expert], key=lambda slot: given[slot // size])
        given[source // size] += not own
        moves.append(ExpertMove(source, target))
    return tuple(moves)


def imbalance(loads: Sequence[float], slots: Sequence[int], num_ranks: int) -> float:
    """Tokens of the busiest rank divided by the mean of all ranks, if replicas share an expert's
    tokens evenly. 1.0 is best, and the result without tokens."""
    size = len(slots) // num_ranks
    per_rank = [
        sum(loads[expert] / slots.count(expert) for expert in slots[first : first + size])
        for first in range(0, len(slots), size)
    ]
    total = sum(per_rank)
    return max(per_rank) * num_ranks / total if total else 1.0
