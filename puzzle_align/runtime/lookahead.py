"""Steps of a model that is trained with a frozen one's forwards a batch ahead in its bubbles."""

from collections.abc import Callable, Sequence

import torch

from puzzle_align.runtime.context import Context
from puzzle_align.runtime.executor import ModelRun, execute
from puzzle_align.runtime.passes import sum_responses
from puzzle_align.runtime.row_input import RowInput
from puzzle_align.schedules.actions import Program
from puzzle_align.schedules.costs import Costs
from puzzle_align.schedules.lookahead import LookaheadStep, lookahead_step
from puzzle_align.schedules.timeline import Span


class Lookahead:
    """Two models on one grid of ranks, and what the frozen one has done ahead of the steps.

    From step to step this rank keeps the log-probabilities that the frozen model has made ahead,
    and what it has received and not run yet.
    """

    def __init__(self, trained: Context, frozen: Context, costs: Costs) -> None:
        assert trained.plan.grid == frozen.plan.grid
        self._trained = trained
        self._costs = costs
        self._ahead = ModelRun(frozen, rows=[], finish=self._finish, train=False)
        self._rows: list[RowInput] = []  # of this step and the next, in the lookahead's numbers
        self._done: tuple[int, ...] = ()  # of the next step's rows, by virtual position
        self._log_probs: dict[int, torch.Tensor] = {}  # by the lookahead model's microbatch, [B, K]

    def compose(self, num_microbatches: int, num_ahead: int) -> LookaheadStep:
        """The lists of the step after those that have run, of so many rows in it and in the next.

        It takes up to a second, which another thread may spend before the step begins.
        """
        trained, frozen = self._trained, self._ahead.context
        return lookahead_step(
            Program(
                trained.role,
                num_microbatches,
                trained.plan.virtual_pipeline,
                schedule=trained.plan.schedule,
            ),
            frozen.role,
            num_ahead,
            num_ranks=trained.plan.pipeline,
            costs=self._costs,
            done=self._done,
        )

    def accumulate_gradients(
        self,
        step: LookaheadStep,
        rows: Sequence[RowInput],
        ahead: Sequence[RowInput],
        loss: Callable[[RowInput, torch.Tensor, torch.Tensor], torch.Tensor],
        spans: list[Span] | None = None,
    ) -> None:
        """Forward and backward over ``rows``, gradients summed into the trained model's buffers.

        Args:
            step: what ``compose`` gave for as many rows.
            rows: this rank's; those that were ``ahead`` in the call before.
            ahead: this rank's rows of the next step; none in the last.
            loss: ``(row, log-probabilities [B, K], frozen model's [B, K]) -> scalar``, called on
                the last pipeline rank.
            spans: as ``execute``'s.
        """
        known = self._ahead.rows
        assert not known or all(a is b for a, b in zip(known, rows, strict=True)), "another step"

        def finish(microbatch: int, log_probs: torch.Tensor) -> torch.Tensor:
            row = rows[microbatch]
            return loss(row, sum_responses(row, log_probs), self._log_probs.pop(microbatch))

        trained, frozen = self._trained, self._ahead.context
        self._rows = [*rows, *ahead]
        self._ahead.rows = self._rows
        training = ModelRun(trained, rows=rows, finish=finish, train=True)
        runs = {trained.role: training, frozen.role: self._ahead}
        execute(step.lists[trained.pipeline_rank], runs, spans)
        self._done = step.done
        self._ahead.advance(len(rows))
        self._log_probs = {n - len(rows): made for n, made in self._log_probs.items()}

    def _finish(self, microbatch: int, log_probs: torch.Tensor) -> None:
        row = self._rows[microbatch]
        self._log_probs[microbatch] = sum_responses(row, log_probs)
