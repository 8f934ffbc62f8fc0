"""Whole passes over a global batch, of one model or of several on one pipeline.

A response's output depends on the model's head: the summed log-probability of its tokens, or with a
scalar head, its reward. With ``statistics`` there are further sums (``sum_responses``).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import torch

from puzzle_align.algos.logprobs import STATISTICS, sum_by_slot
from puzzle_align.runtime.context import Context
from puzzle_align.runtime.executor import ModelRun, execute
from puzzle_align.runtime.row_input import RowInput
from puzzle_align.schedules.actions import Action, Program
from puzzle_align.schedules.costs import Costs, ModelCosts
from puzzle_align.schedules.dependencies import Dependencies
from puzzle_align.schedules.lowering import lower
from puzzle_align.schedules.timeline import Span
from puzzle_align.schedules.timeshare import one_after_the_other, time_share
from puzzle_align.schedules.timing import timeline_of
from puzzle_align.schedules.validate import validate


class SequenceSums(NamedTuple):
    """Sums of ``sum_responses``: C = 6 tensors, float64 [B, K] each."""

    weighted: torch.Tensor  # log-probabilities, each with its weight
    likelihood: torch.Tensor  # without weights, with the prompt's if it is predicted
    # Over the responses' tokens, as in ``algos.logprobs.STATISTICS``:
    entropy: torch.Tensor | None = None
    mean_logit: torch.Tensor | None = None
    is_top1: torch.Tensor | None = None
    log_sum_squares: torch.Tensor | None = None


NUM_SUMS = len(SequenceSums._fields)
assert SequenceSums._fields[2:] == STATISTICS


def run_together(
    runs: Mapping[str, ModelRun], *, costs: Costs | None = None, spans: list[Span] | None = None
) -> None:
    """Run whole passes of models that share their ranks, trained or forward-only. Collective.

    A model's results are bitwise the same as alone, in any order. ``runs`` and ``costs`` are those
    of ``action_list``, ``spans`` is that of ``execute``.
    """
    execute(action_list(runs, costs), runs, spans)


def action_list(runs: Mapping[str, ModelRun], costs: Costs | None = None) -> list[Action]:
    """Make this rank's actions for whole passes of models that share their ranks.

    Args:
        runs: by role, in the same order on all ranks; plans may differ only in layers and chunks
            of a rank. Each run has its own rows, the same number on all its ranks.
        costs: by role, the same on all ranks: the models share time, in an order chosen to be
            short. None runs one model after the other, in the order of ``runs``.
    """
    contexts = [run.context for run in runs.values()]
    plans = {replace(context.plan.grid, virtual_pipeline=1) for context in contexts}
    assert len(plans) == 1, "the models' plans differ"
    programs = tuple(
        Program(
            role,
            len(run.rows),
            run.context.plan.virtual_pipeline,
            backward=run.train,
            schedule=run.context.plan.schedule,
        )
        for role, run in runs.items()
    )
    known = None if costs is None else tuple((role, costs[role]) for role in runs)
    return schedule(programs, contexts[0].plan.pipeline, known)[contexts[0].pipeline_rank]


@lru_cache(maxsize=64)
def schedule(
    programs: tuple[Program, ...],
    num_ranks: int,
    costs: tuple[tuple[str, ModelCosts], ...] | None = None,
) -> list[list[Action]]:
    """Make the validated, lowered lists of ``action_list``, one for each pipeline rank."""
    timeline = None
    if costs is None:
        lists = one_after_the_other(programs, num_ranks)
    else:
        lists = time_share(programs, num_ranks, dict(costs))
        timeline = timeline_of(lists, Dependencies(programs, num_ranks), dict(costs))
    lowered = lower(lists, programs, timeline)
    validate(lowered, programs)
    return lowered


def response_outputs(
    context: Context,
    rows: Sequence[RowInput],
    num_examples: int,
    num_branches: int,
    spans: list[Span] | None = None,
) -> torch.Tensor:
    """Compute the output of every response of the global batch, float64 [B, K] or [C, B, K].

    ``rows`` are this rank's, ``spans`` is that of ``execute``; the result is complete and equal on
    all of the context's ranks. Collective over them. Each response is on one replica, zero
    elsewhere, so the sum over ranks is exact.
    """
    shape: tuple[int, ...] = num_examples, num_branches
    if context.chunks[-1].statistics:
        shape = NUM_SUMS, *shape
    table = torch.zeros(shape, dtype=torch.float64, device=context.device)

    def finish(microbatch: int, outputs: torch.Tensor) -> None:
        row = rows[microbatch]
        table[..., row.examples, :] = sum_responses(row, outputs)

    run_together({context.role: ModelRun(context, rows, finish, train=False)}, spans=spans)
    return context.sum_over_ranks(table if context.is_output_rank else table.zero_())


def accumulate_gradients(
    context: Context,
    rows: Sequence[RowInput],
    loss: Callable[[RowInput, torch.Tensor], torch.Tensor],
    spans: list[Span] | None = None,
) -> None:
    """Run forward and backward over this rank's rows; add gradients to the context's buffers.

    Args:
        loss: ``(row, response outputs [B, K], or [C, B, K]) -> scalar``, called on the last
            pipeline rank; the sum over all microbatches and replicas is differentiated.
        spans: that of ``execute``.
    """

    def finish(microbatch: int, outputs: torch.Tensor) -> torch.Tensor:
        row = rows[microbatch]
        return loss(row, sum_responses(row, outputs))

    run_together({context.role: ModelRun(context, rows, finish, train=True)}, spans=spans)


def sum_responses(row: RowInput, outputs: torch.Tensor) -> torch.Tensor:
    """Sum a row's weighted outputs [N] by response: float64 [B, K].

    For log-probabilities with ``STATISTICS`` [5, N]: ``SequenceSums`` as float64 [C, B, K].
    """
    values = outputs if outputs.dim() == 1 else outputs[0]
    weighted = _summed(row, values if row.weights is None else values * row.weights)
    if outputs.dim() == 1:
        return weighted
    plain = weighted if row.weights is None else _summed(row, values)
    statistics = [_summed(row, statistic[: row.num_response_tokens]) for statistic in outputs[1:]]
    return torch.stack([weighted, plain, *statistics])


def _summed(row: RowInput, values: torch.Tensor) -> torch.Tensor:
    """Sum values of the row's first predictions by response."""
    return sum_by_slot(values, row.cells[: len(values)], row.lengths.numel()).view_as(row.lengths)
