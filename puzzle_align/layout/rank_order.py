"""Order of ranks under another plan that moves the fewest weights when plans are switched.

A *run* is a sequence of layers at the same position under both plans. Its layers are alike but for
their names, so overlaps are computed on a small model with one layer a run, each counted as many
times as its run is long.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from heapq import heapify, heappop, heappush
from itertools import groupby, product
from math import prod

from puzzle_align.layout.holdings import Holdings
from puzzle_align.layout.job_plan import JobPlan
from puzzle_align.layout.model import ModelSpec
from puzzle_align.layout.plan import ParallelPlan
from puzzle_align.layout.rules import extents, overlap

RANKS_PER_NODE = 8  # where nothing says how many there are

_Part = tuple[int, int]  # (pipeline rank, tensor rank)
_LAYER = re.compile(r"model\.layers\.(\d+)\.")


@dataclass(frozen=True)
class LayerRuns:
    """A model with one layer a run, both plans for it, and the runs' lengths."""

    model: ModelSpec
    before: ParallelPlan
    after: ParallelPlan
    lengths: tuple[int, ...]

    def times(self, tensor: str) -> int:
        """Number of the whole model's tensors that a tensor of the small model represents."""
        layer = _LAYER.match(tensor)
        return 1 if layer is None else self.lengths[int(layer[1])]


@lru_cache(maxsize=1024)
def layer_runs(model: ModelSpec, before: ParallelPlan, after: ParallelPlan) -> LayerRuns:
    """Runs of a model under two plans, which must divide it (``division_problems``)."""
    places = list(zip(_positions(model, before), _positions(model, after), strict=True))
    runs = [(place, len(list(run))) for place, run in groupby(places)]
    small = replace(model, num_hidden_layers=len(runs))
    plans = [
        _with_layers(plan, [place[number] for place, _ in runs])
        for number, plan in enumerate((before, after))
    ]
    return LayerRuns(small, plans[0], plans[1], tuple(length for _, length in runs))


def _positions(model: ModelSpec, plan: ParallelPlan) -> list[int]:
    """The virtual position of every layer."""
    positions = range(plan.num_positions)
    return [p for p in positions for _ in plan.layers_of(p, model.num_hidden_layers)]


def _with_layers(plan: ParallelPlan, positions: list[int]) -> ParallelPlan:
    layers = tuple(positions.count(position) for position in range(plan.num_positions))
    return replace(plan, pipeline_layers=layers if len(set(layers)) > 1 else ())


def ordered_ranks(
    source: Holdings, plan: ParallelPlan, ranks: tuple[int, ...], ranks_per_node: int
) -> tuple[int, ...]:
    """Order ``ranks`` for ``plan`` so that they already hold much of their new part of the model.

    Nodes come first: a tensor group, which communicates in every layer, stays within a node. If the
    ranks of a node are not a multiple of T, the order is kept as it is. The tensor groups of
    pipeline ranks are matched with nodes, then every node's ranks with parts of the plan, both
    greedily, the largest overlap first. For plans that differ by whole factors this is HybridFlow's
    grouping (its 3D-HybridEngine): T 8 -> 2 keeps an eighth of the model on every rank; in the
    usual order only half of the ranks would keep it.

    Args:
        ranks: as many as the plan has; they may be others than the source's.
    """
    assert plan.world_size == len(ranks), f"{plan} is for {plan.world_size} ranks"
    if plan == source.plan and set(ranks) == set(source.ranks):
        return source.ranks  # nothing moves
    by_node = groupby(sorted(ranks), lambda rank: rank // ranks_per_node)
    nodes = [tuple(ranks_there) for _, ranks_there in by_node]
    if any(len(node) % plan.tensor for node in nodes):
        return ranks
    runs = layer_runs(source.model, source.plan, plan)
    unplaced = Holdings(runs.model, runs.after, tuple(range(plan.world_size)))
    common = _in_common(Holdings(runs.model, runs.before, source.ranks), unplaced, runs)
    coordinates = map(unplaced.topology.coordinates, range(plan.world_size))
    usual = {rank: (p, t) for rank, (p, _, t) in zip(ranks, coordinates, strict=True)}
    overlaps = _Overlaps(common, usual)
    groups: list[list[tuple[int, ...]]] = [[] for _ in range(plan.pipeline)]
    for node, numbers in zip(nodes, _groups_by_node(nodes, plan, overlaps), strict=True):
        parts = {(p, t): number for p, number in numbers.items() for t in range(plan.tensor)}
        matched = overlaps.matched(node, parts)
        for p in numbers:
            groups[p] += zip(*(matched[p, t] for t in range(plan.tensor)), strict=True)
    return tuple(rank for of_position in groups for group in of_position for rank in group)


def torn_groups(plan: JobPlan, ranks_per_node: int) -> Iterator[str]:
    """A line for every role and placement with tensor groups that lie on several nodes."""
    for role, placed in dict.fromkeys((c.role, c.placed) for c in plan.contexts):
        grid, ranks = placed
        groups = [ranks[n : n + grid.tensor] for n in range(0, len(ranks), grid.tensor)]
        torn = [group for group in groups if len({rank // ranks_per_node for rank in group}) > 1]
        if torn:
            yield (
                f"{role}: {len(torn)} of {len(groups)} tensor groups, such as ranks "
                f"{torn[0][0]} to {torn[0][-1]}, lie on several nodes of {ranks_per_node} ranks "
                "and communicate in every layer: choose ranks, or a tensor_model_parallel_size, "
                "that keep a group on one node"
            )


@dataclass(frozen=True)
class _Overlaps:
    """Weights that a rank holds of a part, and the part of every rank in the usual order."""

    common: Counter[tuple[int, _Part]]
    usual: Mapping[int, _Part]

    def matched(self, ranks: Iterable[int], room: Mapping[_Part, int]) -> dict[_Part, list[int]]:
        """Match ranks with parts, each with ``room`` for some, the largest overlap first."""
        matched: dict[_Part, list[int]] = {part: [] for part in room}
        unmatched = set(ranks)

        def order(pair: tuple[int, _Part]) -> tuple[int, bool, int, _Part]:
            rank, part = pair
            return -self.common[pair], self.usual[rank] != part, rank, part

        for rank, part in sorted(product(unmatched, room), key=order):
            if rank in unmatched and len(matched[part]) < room[part]:
                matched[part].append(rank)
                unmatched.remove(rank)
        return {part: sorted(there) for part, there in matched.items()}


def _groups_by_node(
    nodes: Sequence[tuple[int, ...]], plan: ParallelPlan, overlaps: _Overlaps
) -> list[Counter[int]]:
    """Number of tensor groups of every pipeline rank on each node."""
    free, groups_left = [set(node) for node in nodes], [plan.data] * plan.pipeline
    numbers: list[Counter[int]] = [Counter() for _ in nodes]

    def candidate(number: int, p: int) -> tuple[int, int, int, int, int, tuple[int, ...]]:
        """A group of pipeline rank ``p`` on a node, in order of preference."""
        matched = overlaps.matched(free[number], {(p, t): 1 for t in range(plan.tensor)})
        group = tuple(rank for (rank,) in matched.values())
        held = sum(overlaps.common[rank, (p, t)] for t, rank in enumerate(group))
        in_place = sum(overlaps.usual[rank] == (p, t) for t, rank in enumerate(group))
        return -held, -in_place, number, p, len(free[number]), group

    heap = [candidate(number, p) for number in range(len(nodes)) for p in range(plan.pipeline)]
    heapify(heap)
    while heap:
        *_, number, p, num_free, group = heappop(heap)
        if not groups_left[p] or not free[number]:
            continue
        if len(free[number]) < num_free:  # others of the node's ranks were taken since
            heappush(heap, candidate(number, p))
            continue
        free[number] -= set(group)
        groups_left[p] -= 1
        numbers[number][p] += 1
        if free[number]:
            heappush(heap, candidate(number, p))
    return numbers


def _in_common(source: Holdings, wanted: Holdings, runs: LayerRuns) -> Counter[tuple[int, _Part]]:
    """Number of weights in the overlap of each rank of the source and part of the other plan."""
    numbers: Counter[tuple[int, _Part]] = Counter()
    place = {
        wanted.topology.rank(p, d, t): (p, t)
        for p in range(wanted.plan.pipeline)
        for d in range(wanted.plan.data)
        for t in range(wanted.plan.tensor)
    }
    for tensor, boxes in wanted.holders.items():
        times = runs.times(tensor)
        for box, places in boxes.items():
            parts = {place[rank] for rank in places}
            for held, ranks in source.holders[tensor].items():
                shared = overlap(box, held)
                if shared is None:
                    continue
                size = times * prod(extents(shared))
                for rank in ranks:
                    for part in parts:
                        numbers[rank, part] += size
    return numbers
