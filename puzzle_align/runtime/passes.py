"""Whole passes of one model over a global batch: log-probabilities, or gradients.

Of a model with a scalar head, a response's reward stands wherever its log-probability is spoken of:
its row has one prediction a response.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache

import torch

from puzzle_align.algos.logprobs import sum_by_slot
from puzzle_align.runtime.context import Context
from puzzle_align.runtime.executor import ModelRun, execute
from puzzle_align.runtime.row_input import RowInput
from puzzle_align.schedules.actions import Action, Program
from puzzle_align.schedules.lowering import lower
from puzzle_align.schedules.single import alone
from puzzle_align.schedules.timeline import Span
from puzzle_align.schedules.validate import validate
from puzzle_align.spec.plan import ParallelPlan


@lru_cache(maxsize=64)
def schedule(
    role: str, plan: ParallelPlan, num_microbatches: int, train: bool
) -> list[list[Action]]:
    """The proven, lowered action lists of one model's pass, one for each pipeline rank."""
    program = Program(role, num_microbatches, num_chunks=plan.virtual_pipeline, backward=train)
    lowered = lower(alone(program, plan.pipeline), [program])
    validate(lowered, [program])
    return lowered


def response_outputs(
    context: Context,
    rows: Sequence[RowInput],
    num_pairs: int,
    num_branches: int,
    spans: list[Span] | None = None,
) -> torch.Tensor:
    """Summed log-probability of every response of the global batch, float64 [num_pairs, K].

    ``rows`` are this rank's, ``spans`` as ``execute``'s; the result is whole and the same on all of
    the context's ranks. Collective over them. A response is on one replica only, so the sum over
    ranks adds it to zeros: exact.
    """
    table = torch.zeros(num_pairs, num_branches, dtype=torch.float64, device=context.device)

    def finish(microbatch: int, log_probs: torch.Tensor) -> None:
        row = rows[microbatch]
        table[row.pairs] = sum_responses(row, log_probs)

    _run(context, rows, finish, train=False, spans=spans)
    if not context.reports:
        table.zero_()
    return context.sum_over_ranks(table)


def accumulate_gradients(
    context: Context,
    rows: Sequence[RowInput],
    loss: Callable[[RowInput, torch.Tensor], torch.Tensor],
    spans: list[Span] | None = None,
) -> None:
    """Forward and backward over this rank's rows, gradients summed into the context's buffers.

    Args:
        loss: ``(row, response log-probabilities [B, K]) -> scalar``, called on the last
            pipeline rank; the sum over all microbatches and replicas is what is differentiated.
        spans: as ``execute``'s.
    """

    def finish(microbatch: int, log_probs: torch.Tensor) -> torch.Tensor:
        row = rows[microbatch]
        return loss(row, sum_responses(row, log_probs))

    _run(context, rows, finish, train=True, spans=spans)


def sum_responses(row: RowInput, log_probs: torch.Tensor) -> torch.Tensor:
    """Token log-probabilities [N] summed by response, float64 [B, K]."""
    return sum_by_slot(log_probs, row.cells, row.lengths.numel()).view_as(row.lengths)


def _run(
    context: Context,
    rows: Sequence[RowInput],
    finish: Callable[[int, torch.Tensor], torch.Tensor | None],
    *,
    train: bool,
    spans: list[Span] | None,
) -> None:
    lists = schedule(context.role, context.plan, len(rows), train)
    run = ModelRun(context=context, rows=rows, finish=finish, train=train)
    execute(lists[context.pipeline_rank], {context.role: run}, spans)
