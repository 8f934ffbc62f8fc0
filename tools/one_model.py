"""Whole passes of one model: outputs of all responses, and gradients of a loss."""

from collections.abc import Callable, Sequence

import torch

from puzzle_align.runtime.context import Context
from puzzle_align.runtime.executor import ModelRun, action_list, execute
from puzzle_align.runtime.phases import Outputs
from puzzle_align.runtime.row_input import RowInput, sum_responses

# (row, outputs of its responses [B, K]) -> scalar
Loss = Callable[[RowInput, torch.Tensor], torch.Tensor]


def response_outputs(
    context: Context, rows: Sequence[RowInput], num_examples: int, num_responses: int
) -> torch.Tensor:
    """Outputs of all responses [B, K], complete on all of the context's ranks."""
    outputs = Outputs("tokens", context.device)

    def keep(microbatch: int, output: torch.Tensor) -> None:
        if context.is_output_rank:
            outputs.rows.append((rows[microbatch], output))

    runs = {context.role: ModelRun(context, rows, keep, train=False)}
    execute(action_list(runs), runs)
    return context.sum_over_ranks(outputs.by_response(num_examples, num_responses))


def accumulate_gradients(context: Context, rows: Sequence[RowInput], loss: Loss) -> None:
    """Add the gradients of the loss's sum over all rows to the context's buffers."""

    def finish(microbatch: int, outputs: torch.Tensor) -> torch.Tensor:
        row = rows[microbatch]
        return loss(row, sum_responses(row, outputs))

    runs = {context.role: ModelRun(context, rows, finish, train=True)}
    execute(action_list(runs), runs)
