"""How a config splits a model's layers over its pipeline."""

from dataclasses import replace

from puzzle_align.config.job import JobConfig
from puzzle_align.config.sections.models import ParallelConfig
from puzzle_align.layout.attention import BACKENDS
from puzzle_align.layout.balance import balanced_layers
from puzzle_align.layout.model import ModelOptions, ModelSpec
from puzzle_align.layout.plan import ParallelPlan


def with_layers(
    plan: ParallelPlan, job: JobConfig, parallel: ParallelConfig, spec: ModelSpec, *, train: bool
) -> ParallelPlan:
    """The plan with the layers that ``parallel.pipeline_layers`` gives each position of ``spec``.

    What does not fit the model stands as it is: ``layout.divisibility`` tells.
    """
    wanted, num_layers = parallel.pipeline_layers, spec.num_hidden_layers
    is_even = num_layers % plan.num_positions == 0
    if num_layers < plan.num_positions or (wanted is None and is_even):
        return plan.grid
    if isinstance(wanted, list):
        layers = tuple(wanted)
    else:
        # Attention left to the machine never computes all pairs.
        asked = job.engine.attention
        attention = asked if asked in BACKENDS else "flex"
        options = ModelOptions(attention=attention, recompute=parallel.recompute)
        row_tokens = job.packing.row_tokens
        layers = balanced_layers(spec, plan, options, row_tokens=row_tokens, train=train)
    if is_even and layers == (num_layers // plan.num_positions,) * plan.num_positions:
        return plan.grid
    return replace(plan, pipeline_layers=layers)
