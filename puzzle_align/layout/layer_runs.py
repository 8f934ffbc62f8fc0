"""Comparison of two plans of a model by a few of its layers.

Layers that lie next to each other under both plans, a *run*, have everything in common but their
names: what is true of one is true of the others. So a model with one layer a run tells what the
whole one would, where each of its layers counts as many times as its run is long.
"""

import re
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby

from puzzle_align.layout.model import ModelSpec
from puzzle_align.layout.plan import ParallelPlan

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
    """The runs of two plans that divide the model (``layout.divisibility``)."""
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
