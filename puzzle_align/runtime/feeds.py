"""Feeds: a frozen model's outputs for a trained model's loss, computed a batch ahead.

``LookaheadFeed``: the frozen model runs the next batch in the bubbles of the trained model's
pipeline. Both have the same rows: row i holds the same examples on the same rank, so the outputs
are where the loss needs them. ``ConcurrentFeed``: the frozen model runs the next batch on separate
ranks while the others train on this one, and hands its outputs over at the step's end: the policy
waits only if the reference is slower.

Steps come in order, starting at any; all ranks make the same calls.
"""

from collections.abc import Callable, Mapping, Sequence

import torch

from puzzle_align.runtime.ahead import Ahead
from puzzle_align.runtime.context import Context
from puzzle_align.runtime.executor import ModelRun, execute
from puzzle_align.runtime.row_input import RowInput, sum_responses
from puzzle_align.schedules.actions import Program
from puzzle_align.schedules.costs import Costs
from puzzle_align.schedules.lookahead import LookaheadStep, lookahead_step
from puzzle_align.schedules.timeline import Span

# (row, the model's outputs, the row's part of the table's columns) -> scalar: the row's share of
# the loss; the sum over all rows and replicas is differentiated.
Loss = Callable[[RowInput, torch.Tensor, Mapping[str, torch.Tensor]], torch.Tensor]
Rows = Sequence[RowInput]


class LookaheadFeed:
    """Two models on the same ranks, of which the frozen one runs ahead of the steps.

    Between steps this rank keeps the outputs that the frozen model has computed ahead, and received
    inputs that it has not used yet.
    """

    def __init__(
        self,
        trained: Context,
        frozen: Context,
        costs: Costs,
        rows: Callable[[int], Rows],
        num_rows: Callable[[int], int],
        column: str,
    ) -> None:
        """Feed steps whose rows are ``rows(step)`` on this rank.

        Args:
            costs: of both models, by role.
            num_rows: microbatches of a step on every rank; 0 after the last. Called in a thread.
            column: name of the frozen model's outputs, [B, K], in the loss.
        """
        assert trained.plan.grid == frozen.plan.grid
        self._trained = trained
        self._costs = costs
        self._rows_of, self._num_rows, self._column = rows, num_rows, column
        self._ahead = ModelRun(frozen, rows=[], finish=self._keep, train=False)
        self._rows: list[RowInput] = []  # of this step and the next, numbered as in the lookahead
        self._done: tuple[int, ...] = ()  # of the next step's rows, by virtual position
        self._sums: dict[int, torch.Tensor] = {}  # by the frozen model's microbatch, [B, K]
        # Composing lists takes up to a second: a thread does it before the step begins.
        self._lists = Ahead(self._compose, trained.device)

    def prepare(self, step: int) -> None:
        """Start making a step's lists, without waiting, once the step before has been trained."""
        self._lists.prepare(step)

    def train(self, step: int, loss: Loss, spans: list[Span] | None = None) -> None:
        """Run forward and backward over a step's rows, and the frozen model's work ahead."""
        lists = self._lists.of(step)
        rows = self._rows_of(step)
        ahead = self._rows_of(step + 1) if self._num_rows(step + 1) else []
        known = self._ahead.rows
        assert not known or all(a is b for a, b in zip(known, rows, strict=True)), "another step"

        def finish(microbatch: int, outputs: torch.Tensor) -> torch.Tensor:
            columns = {self._column: self._sums.pop(microbatch)}
            return loss(rows[microbatch], outputs, columns)

        trained, frozen = self._trained, self._ahead.context
        self._rows = [*rows, *ahead]
        self._ahead.rows = self._rows
        training = ModelRun(trained, rows=rows, finish=finish, train=True)
        runs = {trained.role: training, frozen.role: self._ahead}
        execute(lists.lists[trained.pipeline_rank], runs, spans)
        self._done = lists.done
        self._ahead.advance(len(rows))
        self._sums = {number - len(rows): made for number, made in self._sums.items()}

    def _compose(self, step: int) -> LookaheadStep:
        trained, frozen = self._trained, self._ahead.context
        return lookahead_step(
            Program(
                trained.role,
                self._num_rows(step),
                trained.plan.virtual_pipeline,
                schedule=trained.plan.schedule,
            ),
            frozen.role,
            self._num_rows(step + 1),
            num_ranks=trained.plan.pipeline,
            costs=self._costs,
            done=self._done,
        )

    def _keep(self, microbatch: int, outputs: torch.Tensor) -> None:
        self._sums[microbatch] = sum_responses(self._rows[microbatch], outputs)


class ConcurrentFeed:
    """Columns of this step and the next from a frozen model on separate ranks.

    ``run(step)`` returns a rank's part of a column, zeros on ranks without the model; ``share``
    sums the parts of all ranks of the job. Collective over the frozen model's ranks, and the world.
    """

    def __init__(
        self,
        run: Callable[[int], torch.Tensor],
        share: Callable[[torch.Tensor], torch.Tensor],
        num_steps: int,
    ) -> None:
        self._run, self._share, self._num_steps = run, share, num_steps
        self._made: dict[int, torch.Tensor] = {}  # this rank's part for the next step
        self._columns: dict[int, torch.Tensor] = {}  # complete columns by step; at most one

    def column(self, step: int) -> torch.Tensor:
        """Return the column of a step, [B, K]; for a run's first step, compute it now."""
        if step not in self._columns:
            self._columns = {step: self._share(self._run(step))}
        return self._columns.pop(step)

    def run_ahead(self, step: int) -> None:
        """Compute the next step's column on the frozen model's ranks, while others train."""
        if step + 1 < self._num_steps:
            self._made = {step + 1: self._run(step + 1)}

    def hand_over(self, step: int) -> None:
        """Share the next step's column with all ranks."""
        if step + 1 < self._num_steps:
            self._columns = {step + 1: self._share(self._made.pop(step + 1))}
