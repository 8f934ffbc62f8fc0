"""Costs of a model's actions without measurements: in proportion to their FLOPs.

FLOPs are those of ``layout.flops.row_flops`` for a full row per microbatch. Layers are at the
positions of the plan, the head is at the last position, and tensor ranks share both.
"""

from puzzle_align.layout.flops import row_flops
from puzzle_align.layout.model import ModelOptions, ModelSpec
from puzzle_align.layout.plan import ParallelPlan
from puzzle_align.planning.memory.model import chunk_activation_bytes
from puzzle_align.schedules.costs import ModelCosts

FLOPS_PER_SECOND = 1e12  # of an imaginary device: only ratios of the times are meaningful


def flop_costs(
    spec: ModelSpec, plan: ParallelPlan, options: ModelOptions, *, row_tokens: int, train: bool
) -> ModelCosts:
    """Seconds at 1 TFLOP/s by virtual position, and bytes that a training forward keeps.

    Without ``train`` the model only runs forward. The plan must divide it (``division_problems``).
    """
    flops = row_flops(spec, options, row_tokens)
    positions = range(plan.num_positions)
    layers = [len(plan.layers_of(position, spec.num_hidden_layers)) for position in positions]

    def by_position(layer: int, head: int) -> tuple[float, ...]:
        *before, last = (number * layer for number in layers)
        return tuple(work / plan.tensor / FLOPS_PER_SECOND for work in (*before, last + head))

    forward = by_position(flops.layer, flops.head)
    if not train:
        return ModelCosts(forward)
    kept = (
        float(chunk_activation_bytes(spec, plan, options, position, row_tokens))
        for position in positions
    )
    return ModelCosts(forward, by_position(flops.layer_backward, flops.head_backward), tuple(kept))
