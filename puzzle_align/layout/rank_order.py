"""The order of ranks for a plan that moves least of a model to it, by a few of its layers.

Layers that lie next to each other under both plans, a *run*, have everything in common but their
names: what is true of one is true of the others. So a model with one layer a run tells what the
whole one would, where each of its layers counts as many times as its run is long.
"""

import re
from collections import Counter
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby
from math import prod

from puzzle_align.layout.holdings import Holdings
from puzzle_align.layout.model import ModelSpec
from puzzle_align.layout.plan import ParallelPlan
from puzzle_align.layout.rules import extents, overlap

_Part = tuple[int, int]  # (pipeline rank, tensor rank)
_LAYER = re.compile(r"model\.layers\.(\d+)\.")


@dataclass(frozen=True)
class LayerRuns:
    """A model with one layer a run, both plans for it, and how long each run is."""

    model: ModelSpec
    before: ParallelPlan
    after: ParallelPlan
    lengths: tuple[int, ...]

    def times(self, tensor: str) -> int:
        """Number of the whole model's tensors that one of the small model's stands for."""
        layer = _LAYER.match(tensor)
        return 1 if layer is None else self.lengths[int(layer[1])]


@lru_cache(maxsize=1024)
def layer_runs(model: ModelSpec, before: ParallelPlan, after: ParallelPlan) -> LayerRuns:
    """The runs of two plans that divide the model (``cut_problems``)."""
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


def ordered_ranks(source: Holdings, plan: ParallelPlan, ranks: tuple[int, ...]) -> tuple[int, ...]:
    """``ranks`` in the order in which the source's model is put on them under ``plan``.

    Where they are exactly the source's ranks, they are in an order in which they already hold much
    of their part; else in the order given. Ranks and parts of the plan are matched greedily, the
    pair with the most in common first. For plans that differ by whole factors this is HybridFlow's
    grouping (its 3D-HybridEngine): T 8 -> 2 keeps an eighth of the model on every rank, where ranks
    in their usual order would keep it on half of them.

    Args:
        plan: for as many ranks as the source has.
    """
    if set(ranks) != set(source.ranks):
        return ranks
    assert plan.world_size == len(source.ranks), f"{plan} is for {plan.world_size} ranks"
    runs = layer_runs(source.model, source.plan, plan)
    unplaced = Holdings(runs.model, runs.after, tuple(range(plan.world_size)))
    common = _in_common(Holdings(runs.model, runs.before, source.ranks), unplaced, runs)
    room = {(p, t): plan.data for p in range(plan.pipeline) for t in range(plan.tensor)}
    placed: dict[_Part, list[int]] = {part: [] for part in room}
    unplaced_ranks = set(source.ranks)
    pairs = ((rank, part) for rank in source.ranks for part in room)
    usual = {rank: unplaced.topology.coordinates(n) for n, rank in enumerate(source.ranks)}

    def order(pair: tuple[int, _Part]) -> tuple[int, bool, int, _Part]:
        rank, part = pair
        return -common[pair], usual[rank][::2] != part, rank, part  # first where it would lie

    for rank, part in sorted(pairs, key=order):
        if rank in unplaced_ranks and len(placed[part]) < room[part]:
            placed[part].append(rank)
            unplaced_ranks.remove(rank)
    replicas = range(plan.data)
    return tuple(
        sorted(placed[p, t])[d]
        for p in range(plan.pipeline)
        for d in replicas
        for t in range(plan.tensor)
    )


def _in_common(source: Holdings, wanted: Holdings, runs: LayerRuns) -> Counter[tuple[int, _Part]]:
    """Numbers that a rank of the source and a part of the other plan have in common."""
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
