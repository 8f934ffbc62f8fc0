"""Parallel plans from their config sections: sizes, layers and ranges of ranks."""

import re
from dataclasses import replace

from puzzle_align.config.job import JobConfig
from puzzle_align.config.sections.models import ParallelConfig
from puzzle_align.files.messages import shown
from puzzle_align.layout.attention import BACKENDS
from puzzle_align.layout.flops import balanced_layers
from puzzle_align.layout.model import ModelOptions, ModelSpec
from puzzle_align.layout.plan import MOST_RANKS, ParallelPlan

_RANKS = re.compile(r"(\d{1,9})(?:\s*-\s*(\d{1,9}))?")


def parse_ranks(text: str, key: str) -> range:
    """The ranks of a range ``0-3`` or a single number; else a one-line ValueError."""
    match = _RANKS.fullmatch(text.strip())
    ranks = range(0)
    if match is not None:
        ranks = range(int(match[1]), int(match[2] or match[1]) + 1)
    if not ranks or ranks[-1] >= MOST_RANKS:
        raise ValueError(
            f"{key}: '{shown(text)}' is not a rank range; write the first and the last, as in 0-3 "
            f"(at most {MOST_RANKS} ranks)"
        )
    return ranks


def with_layers(
    plan: ParallelPlan, config: JobConfig, parallel: ParallelConfig, spec: ModelSpec, *, train: bool
) -> ParallelPlan:
    """The plan with ``spec``'s layers at each pipeline position, by ``parallel.pipeline_layers``.

    Layers that do not fit the model are kept: ``division_problems`` reports them.
    """
    wanted, num_layers = parallel.pipeline_layers, spec.num_hidden_layers
    is_even = num_layers % plan.num_positions == 0
    if num_layers < plan.num_positions or (wanted is None and is_even):
        return plan.grid
    if isinstance(wanted, list):
        layers = tuple(wanted)
    else:
        # auto selects no backend that computes masked query-key pairs: count FLOPs as for flex.
        backend = config.engine.attention
        attention = backend if backend in BACKENDS else "flex"
        options = ModelOptions(attention=attention, recompute=parallel.recompute)
        row_tokens = config.packing.row_tokens
        layers = balanced_layers(spec, plan, options, row_tokens=row_tokens, train=train)
    if is_even and layers == (num_layers // plan.num_positions,) * plan.num_positions:
        return plan.grid
    return replace(plan, pipeline_layers=layers)


def one_replica(parallel: ParallelConfig) -> ParallelPlan:
    """The plan of one data-parallel replica; the data axis may not fit the ranks."""
    return ParallelPlan(
        pipeline=parallel.pipeline_model_parallel_size,
        tensor=parallel.tensor_model_parallel_size,
        virtual_pipeline=parallel.virtual_pipeline_model_parallel_size,
        sequence_parallel=parallel.sequence_parallel,
        schedule=parallel.pipeline_schedule,
    )


def plan_on(parallel: ParallelConfig, num_ranks: int) -> ParallelPlan | None:
    """The plan on all of ``num_ranks`` ranks; None if its sizes do not multiply to that."""
    replica = one_replica(parallel)
    data = parallel.data_parallel_size or max(1, num_ranks // replica.world_size)
    return replace(replica, data=data) if replica.world_size * data == num_ranks else None


def misfit(parallel: ParallelConfig, available: str) -> str:
    """For errors: how the sizes do not match the ``available`` ranks."""
    least = least_ranks(parallel)
    if parallel.data_parallel_size is None:
        return f"P·T = {least} does not divide {available}"
    return f"P·D·T = {least} does not make {available}"


def ranks_of(number: int) -> str:
    """``1 rank``, ``8 ranks``."""
    return f"{number} rank{'s' * (number != 1)}"


def start_what(parallel: ParallelConfig, others: int) -> str:
    """For errors: how many ranks to start, with ``others`` more for another model."""
    least = least_ranks(parallel)
    if parallel.data_parallel_size is None:
        return f"a multiple of {least}" + (f" and {others} more" if others else "")
    return f"{least + others}"


def least_ranks(parallel: ParallelConfig) -> int:
    """Fewest ranks for a plan: one replica if ``data_parallel_size`` is null."""
    return one_replica(parallel).world_size * (parallel.data_parallel_size or 1)
