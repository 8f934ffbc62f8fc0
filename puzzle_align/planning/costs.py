"""What a model's actions cost before anything is measured: in proportion to their FLOPs.

Counted, for one microbatch (a row of S tokens) on one tensor rank: the layers' matrices; attention
over all (query, key) pairs of a causal row, S(S + 1)/2, as if one segment filled it (a packed row
has fewer; ``dense`` computes all S^2); on the last position, the head. Of a preference row the
head predicts the responses: taken as half of the tokens. The embedding is a look-up, and a scalar
head's few products are left out.

The backward of a matrix costs twice its forward. Besides, full recompute makes the layers' forward
again, selective recompute that of attention; the head makes its logits again in any case.
"""

from puzzle_align.layout.model import (
    ModelOptions,
    ModelSpec,
    attention_flops,
    flops_per_token,
    head_flops_per_token,
)
from puzzle_align.layout.plan import ParallelPlan
from puzzle_align.planning.memory import chunk_activation_bytes
from puzzle_align.schedules.costs import ModelCosts

FLOPS_PER_SECOND = 1e12  # of the device whose seconds these are: only ratios mean something


def flop_costs(
    spec: ModelSpec, plan: ParallelPlan, options: ModelOptions, *, row_tokens: int, train: bool
) -> ModelCosts:
    """Seconds at 1 TFLOP/s by virtual position, and bytes that a training forward keeps.

    ``train`` false: of a model that only runs forward. The plan must divide the model
    (``layout.divisibility``).
    """
    num_positions = plan.pipeline * plan.virtual_pipeline
    share = 1 / (num_positions * plan.tensor)  # of the layers, on one rank
    pairs = row_tokens**2 if options.attention == "dense" else row_tokens * (row_tokens + 1) // 2
    attention = attention_flops(spec, pairs) * share
    layers = flops_per_token(spec) * row_tokens * share + attention
    head = 0.0
    if spec.head == "lm":
        head = head_flops_per_token(spec) * (row_tokens / 2) / plan.tensor
    again = {"none": 0.0, "selective": attention, "full": layers}[options.recompute]

    def by_position(own: float, last: float) -> tuple[float, ...]:
        times = [own] * (num_positions - 1) + [own + last]
        return tuple(time / FLOPS_PER_SECOND for time in times)

    forward = by_position(layers, head)
    if not train:
        return ModelCosts(forward)
    kept = float(chunk_activation_bytes(spec, plan, options, row_tokens))
    return ModelCosts(forward, by_position(2 * layers + again, 3 * head), kept)
