"""Lookahead: a frozen model runs the next batch in the bubbles of a trained model's pipeline.

Both have the same rows: row i holds the same examples on the same rank, so the trained model's
loss finds the frozen model's outputs on its rank. Steps come in order, starting at any; all ranks
make the same calls.
"""

from collections.abc import Callable, Sequence

import torch

from puzzle_align.runtime.ahead import Ahead
from puzzle_align.runtime.columns import REFERENCE
from puzzle_align.runtime.context import Context
from puzzle_align.runtime.executor import ModelRun, execute
from puzzle_align.runtime.row_input import Loss, RowInput, sum_responses
from puzzle_align.schedules.actions import Program
from puzzle_align.schedules.costs import Costs
from puzzle_align.schedules.lookahead import LookaheadStep, lookahead_step
from puzzle_align.schedules.timeline import Span

Rows = Sequence[RowInput]


class Lookahead:
    """Runs steps of both models; between steps it keeps the next step's frozen outputs so far.

    It also keeps inputs that the frozen model has received and not used yet.
    """

    def __init__(
        self,
        trained: Context,
        frozen: Context,
        costs: Costs,
        rows: Callable[[int], Rows],
        num_rows: Callable[[int], int],
    ) -> None:
        """Prepare for steps whose rows on this rank are ``rows(step)``.

        Args:
            costs: costs of both models, by role.
            num_rows: microbatches of a step on every rank; 0 after the last. Called in a thread.
        """
        assert trained.plan.grid == frozen.plan.grid
        self._trained = trained
        self._costs = costs
        self._rows_of, self._num_rows = rows, num_rows
        self._ahead = ModelRun(frozen, rows=[], finish=self._keep, train=False)
        self._done: tuple[int, ...] = ()  # rows of the next step done, by virtual position
        self._sums: dict[int, torch.Tensor] = {}  # by the frozen model's microbatch, [B, K]
        # Composing lists takes up to a second: a thread does it before the step begins.
        self._lists = Ahead(self._compose, trained.device)

    def prepare(self, step: int) -> None:
        """Start making a step's lists, without waiting, once the step before has been trained."""
        self._lists.prepare(step)

    def train(
        self, step: int, loss: Loss, seed: tuple[int, int], spans: list[Span] | None = None
    ) -> None:
        """Run forward and backward over a step's rows, and the frozen model's work ahead.

        Args:
            seed: the job's, and the step: for dropout of adapters.
            spans: receives the times of this rank's actions; given on all ranks, or on none.
        """
        lists = self._lists.of(step)
        rows = self._rows_of(step)
        ahead = self._rows_of(step + 1) if self._num_rows(step + 1) else []
        known = self._ahead.rows
        assert not known or all(a is b for a, b in zip(known, rows, strict=True)), "another step"

        def finish(microbatch: int, outputs: torch.Tensor) -> torch.Tensor:
            return loss(rows[microbatch], outputs, {REFERENCE: self._sums.pop(microbatch)})

        trained, frozen = self._trained, self._ahead.context
        self._ahead.rows = [*rows, *ahead]  # until ``advance``
        training = ModelRun(trained, rows=rows, finish=finish, train=True, seed=seed)
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
        self._sums[microbatch] = sum_responses(self._ahead.rows[microbatch], outputs)
