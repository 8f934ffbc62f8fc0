"""How a training step runs the reference: before the policy, or a batch ahead in its bubbles."""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from puzzle_align.runtime.ahead import Ahead
from puzzle_align.runtime.context import Context
from puzzle_align.runtime.lookahead import Lookahead
from puzzle_align.runtime.passes import accumulate_gradients
from puzzle_align.runtime.row_input import RowInput
from puzzle_align.schedules.costs import Costs
from puzzle_align.schedules.lookahead import LookaheadStep
from puzzle_align.schedules.timeline import Span
from puzzle_align.stages.preference.reference import Reference
from puzzle_align.stages.preference.step_rows import StepRows
from puzzle_align.stages.tracing import Tracer

# (row, its log-probabilities [B, K], the reference's [B, K]) -> scalar
RowLoss = Callable[[RowInput, torch.Tensor, torch.Tensor], torch.Tensor]


class Placement(Protocol):
    """The policy's gradients, wherever the reference's part of them comes from."""

    def accumulate_gradients(self, step: int, loss: RowLoss) -> None:
        """Forward and backward of a step's rows into the policy's gradients. Collective.

        Steps are asked for in order, the first one being any. ``loss`` is called for every row on
        the last pipeline rank; the sum over all rows and replicas is what is differentiated.
        """
        ...

    def prepare(self, step: int) -> None:
        """Have what a step needs made, once the passes of the one before are launched; do not wait.

        A step that was not prepared is made when it is asked for.
        """
        ...

    def end_step(self, step: int) -> None:
        """Wait for what ranks without the policy do for the next step. Collective."""
        ...


class Sequential:
    """The reference's log-probabilities of the whole batch first, then the policy."""

    def __init__(
        self,
        policy: Context,
        reference: Reference,
        steps: StepRows,
        tracer: Tracer,
        prepare: Callable[[int, torch.Tensor], None] | None = None,
    ) -> None:
        """``prepare(step, the reference's [B, K])`` is called before the policy's pass."""
        self._prepare = prepare
        self._policy = policy
        self._reference = reference
        self._steps = steps
        self._tracer = tracer

    def accumulate_gradients(self, step: int, loss: RowLoss) -> None:
        """See ``Placement``."""
        table = self._reference.log_probs(self._steps, step)
        if self._prepare is not None:
            self._prepare(step, table)
        spans = self._tracer.spans(self._policy.role)
        accumulate_against(table, self._policy, self._steps.rows(step), loss, spans)

    def prepare(self, step: int) -> None:
        """See ``Placement``."""
        self._steps.prepare(step)

    def end_step(self, step: int) -> None:
        """Nothing: no other rank works for the next step."""


class TimeShared:
    """The reference's forwards of the next batch in the bubbles of the policy's pipeline.

    Both see the data alike: the reference's row i holds the same pairs on the same rank as the
    policy's, so its log-probabilities are where the policy's loss wants them.
    """

    def __init__(
        self,
        policy: Context,
        reference: Context,
        steps: StepRows,
        num_steps: int,
        costs: Costs,
        tracer: Tracer,
    ) -> None:
        self._lookahead = Lookahead(policy, reference, costs)
        self._lists = Ahead(self._compose, policy.device)
        self._steps = steps
        self._num_steps = num_steps
        self._tracer = tracer

    def accumulate_gradients(self, step: int, loss: RowLoss) -> None:
        """See ``Placement``."""
        rows = self._steps.rows(step)
        ahead = self._steps.rows(step + 1) if step + 1 < self._num_steps else []
        lists = self._lists.of(step)
        spans = self._tracer.spans("lookahead")
        self._lookahead.accumulate_gradients(lists, rows, ahead, loss, spans)

    def prepare(self, step: int) -> None:
        """See ``Placement``."""
        self._steps.prepare(step)
        if step + 1 < self._num_steps:
            self._steps.prepare(step + 1)
        self._lists.prepare(step)

    def end_step(self, step: int) -> None:
        """Nothing: no other rank works for the next step."""

    def _compose(self, step: int) -> LookaheadStep:
        loader = self._steps.loader
        follows = step + 1 < self._num_steps
        num_ahead = loader.num_microbatches(step + 1) if follows else 0
        return self._lookahead.compose(loader.num_microbatches(step), num_ahead)


def accumulate_against(
    table: torch.Tensor,
    policy: Context,
    rows: Sequence[RowInput],
    loss: RowLoss,
    spans: list[Span] | None,
) -> None:
    """Forward and backward of ``rows``; ``table`` [B, K] is the reference's part, of B pairs."""

    def against_table(row: RowInput, log_probs: torch.Tensor) -> torch.Tensor:
        return loss(row, log_probs, table[row.examples])

    accumulate_gradients(policy, rows, against_table, spans)
