"""Order of ranks under another plan that moves the fewest weights when plans are switched.

A *run* is a sequence of layers at the same position under both plans. Its layers are alike but for
their names, so overlaps are computed on a small model with one layer a run, each counted as many
times as its run is long.
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


def ordered_ranks(source: Holdings, plan: ParallelPlan, ranks: tuple[int, ...]) -> tuple[int, ...]:
    """Order ``ranks`` for ``plan`` so that they already hold much of their new part of the model.

    Ranks that are not exactly the source's keep their order. Ranks and parts of the plan are
    matched greedily, the pair with the largest overlap first. For plans that differ by whole
    factors this is HybridFlow's grouping (its 3D-HybridEngine): T 8 -> 2 keeps an eighth of the
    model on every rank; in the usual order only half of the ranks would keep it.

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
        return -common[pair], usual[rank][::2] != part, rank, part  # prefer the usual place

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
