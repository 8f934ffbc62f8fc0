"""Run this rank's part in the phases of a job's plan.

A phase's contexts run in groups: colocated ones share a pipeline's time, or run one after the
other; groups on separate ranks run concurrently, groups that share ranks in order. A model's
results are bitwise the same in every case.

A frozen context beside a trained one *feeds* it: the loss reads its outputs for the same rows. It
runs over the whole batch before training (order sequential), a batch ahead in the bubbles of the
trained model's pipeline (time_shared), or a batch ahead on separate ranks (concurrent). All ranks
make the same calls and meet in ``end_step``, so that no work is in flight between two steps: a stop
or a checkpoint finds no batch half run, and a resumed run starts as at its first step.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from puzzle_align.layout.job_plan import ContextPlan, Phase, Workload
from puzzle_align.models.host_copy import copied
from puzzle_align.runtime.batches import Batches, DataBatches
from puzzle_align.runtime.columns import REFERENCE, Items, Table
from puzzle_align.runtime.context import Context
from puzzle_align.runtime.executor import ModelRun, action_list, execute
from puzzle_align.runtime.groups.collectives import sum_on_host
from puzzle_align.runtime.lookahead import Lookahead
from puzzle_align.runtime.optimizer.optimizer import Optimizer
from puzzle_align.runtime.row_input import (
    NUM_SUMS,
    Loss,
    OutputKind,
    Reading,
    RowInput,
    sum_responses,
)
from puzzle_align.schedules.actions import Action
from puzzle_align.schedules.costs import Costs
from puzzle_align.schedules.timeline import Span

_Group = list[tuple[ContextPlan, Context]]  # colocated contexts on this rank


@dataclass
class Outputs:
    """Outputs of a model for this rank's rows; empty except on the model's output ranks."""

    kind: OutputKind
    device: torch.device
    statistics: bool = False  # whether outputs have ``SequenceSums``' statistics
    rows: list[tuple[RowInput, torch.Tensor]] = field(default_factory=list)

    def by_response(self, num_examples: int, num_responses: int) -> torch.Tensor:
        """Sum outputs by response, float64 [B, K] or [C, B, K]; zero for other ranks' responses.

        The sum over ranks is the complete column.
        """
        shape = (NUM_SUMS,) * self.statistics + (num_examples, num_responses)
        column = torch.zeros(shape, dtype=torch.float64, device=self.device)
        for row, output in self.rows:
            column[..., row.examples, :] = sum_responses(row, output)
        return column

    def by_token(self) -> Items:
        """Split outputs by response, float64: [n] of tokens, [n + 1] of states, [1] of responses.

        The host waits for the device once.
        """
        if not self.rows:
            return {}
        together = torch.cat([output for _, output in self.rows]).double().cpu().numpy()
        ends = np.cumsum([len(output) for _, output in self.rows])
        items: Items = {}
        for (row, _), values in zip(self.rows, np.split(together, ends[:-1]), strict=True):
            items |= _taken_apart(row, values, self.kind)
        return items

    def places(self, lengths: np.ndarray) -> np.ndarray:
        """Number of outputs for responses of these lengths, int64 [n]."""
        if self.kind == "responses":
            return np.ones_like(lengths)
        return lengths + 1 if self.kind == "states" else lengths


def _taken_apart(row: RowInput, values: np.ndarray, kind: OutputKind) -> Items:
    """Split a row's outputs by response: its tokens' outputs, then the one at its end, if any."""
    if kind == "responses":
        return {r: values[place : place + 1] for place, r in enumerate(row.responses.tolist())}
    num_tokens = row.slot_lengths.sum()
    parts = np.split(values[:num_tokens], np.cumsum(row.slot_lengths)[:-1])
    if kind == "states":
        ends = values[num_tokens:]
        parts = [np.append(part, end) for part, end in zip(parts, ends, strict=False)]
    return dict(zip(row.responses.tolist(), parts, strict=False))  # no responses: an empty part


class PhaseRunner:
    """Runs phases with this rank's contexts and optimizers."""

    def __init__(
        self,
        contexts: Mapping[tuple[str, Workload], Context],
        optimizers: Mapping[str, Optimizer],
        device: torch.device,
        *,
        reading: Callable[[ContextPlan], Reading],
        seed: int = 0,
        costs: Callable[[Sequence[ContextPlan]], Costs] = lambda _: {},
        spans: Callable[[Phase, str], list[Span] | None] = lambda _phase, _name: None,
    ) -> None:
        """Take over this rank's contexts, and trained models' optimizers by role.

        Args:
            reading: returns a context's reading of rows.
            seed: of adapters' dropout, with the step.
            costs: returns colocated contexts' costs by role, which order time-sharing models.
            spans: returns the list that records the next execution of a name in a phase.
        """
        self.contexts, self.optimizers, self.device = contexts, optimizers, device
        self.is_cold = device.type == "cuda"
        self._seed = seed
        self._costs, self._reading, self._spans = costs, reading, spans
        self._num_steps = 0
        self._tables: Mapping[str, np.ndarray] | None = None  # computed before the run
        self._batches: DataBatches | None = None  # batches that are fed a batch ahead
        self._lookahead: Lookahead | None = None  # time_shared
        self._part: torch.Tensor | None = None  # concurrent: this rank's part of the next column
        self._next: dict[int, torch.Tensor] = {}  # concurrent: the next complete column, by step

    def context(self, planned: ContextPlan) -> Context | None:
        """Return this rank's part of a context; None if it has none."""
        return self.contexts.get((planned.role, planned.workload))

    def held(self, phase: Phase, *roles: str) -> list[Context]:
        """Return this rank's parts of a phase's contexts, all or of these roles."""
        contexts = [self.context(c) for c in phase.contexts if not roles or c.role in roles]
        return [context for context in contexts if context is not None]

    def infer(self, phase: Phase, batches: Batches, step: int, *roles: str) -> dict[str, Outputs]:
        """Run forwards of a phase's models over a step's rows; return this rank's outputs by role.

        Collective over each model's ranks.

        Args:
            roles: roles to run, including trained ones; none: all.
        """
        made = {
            planned.role: Outputs(self._reading(planned).output_kind, self.device)
            for planned in phase.contexts
            if not roles or planned.role in roles
        }
        for group in self._groups(phase, made):
            runs = {}
            for planned, context in group:
                rows = batches.seen_by(context).rows(step, self._reading(planned))
                made[planned.role].statistics = context.statistics
                keep = _keep(made[planned.role], rows, context.is_output_rank)
                runs[planned.role] = ModelRun(context, rows, keep, train=False)
            execute(self._actions(phase, group, runs), runs, self._recorder(phase, group))
        return made

    def train(
        self,
        phase: Phase,
        batches: Batches,
        step: int,
        losses: Mapping[str, Loss],
        table: Table,
    ) -> None:
        """Compute gradients of a phase's trained models over a step's rows, reduced over replicas.

        Roles without a loss are left out. Collective over each model's ranks.

        Args:
            table: columns for the losses, except a column that the lookahead makes row by row.
        """
        for group in self._groups(phase, losses):
            for planned, _ in group:
                self.optimizers[planned.role].zero_grad()
            if self._lookahead is not None:
                (loss,) = losses.values()
                self._warm_up(phase, batches, step, loss)
                seed = self._seed, step
                self._lookahead.train(step, loss, seed, self._spans(phase, "lookahead"))
            else:
                runs = self._training_runs(batches, step, group, losses, table)
                execute(self._actions(phase, group, runs), runs, self._recorder(phase, group))
            for planned, _ in group:
                self.optimizers[planned.role].reduce_gradients()
        if self._batches is not None and phase.order == "concurrent" and step + 1 < self._num_steps:
            made = self.infer(phase, self._batches, step + 1, _frozen(phase).role)
            self._part = _part(made, self._batches, step + 1)

    def open_feed(
        self,
        phase: Phase,
        batches: DataBatches,
        num_steps: int,
        tables: Mapping[str, np.ndarray] | None,
    ) -> None:
        """Let a phase's frozen context feed its trained one, a batch ahead if possible.

        Args:
            batches: batches of the run's ``num_steps`` steps.
            tables: every data set's column [n, K], by fingerprint, if computed before the run.
        """
        self._tables, self._num_steps = tables, num_steps
        if not phase.is_fed or phase.order == "sequential":
            return
        self._batches = batches
        if phase.order == "time_shared":
            (trained,), frozen, loader = phase.trained, _frozen(phase), batches.loader
            self._lookahead = Lookahead(
                self.contexts[trained.role, trained.workload],
                self.contexts[frozen.role, frozen.workload],
                self._costs(phase.contexts),
                lambda step: batches.rows(step, self._reading(trained)),
                lambda step: loader.num_microbatches(step) if step < num_steps else 0,
            )

    def fed(self, phase: Phase, batches: DataBatches, step: int) -> dict[str, torch.Tensor]:
        """Return the column that feeds a phase's losses in a step, [B, K] on all ranks, by name.

        Empty if there is none, or if the losses get it row by row. Call it before ``train``.
        Collective.
        """
        if self._tables is not None:
            table = self._tables[batches.dataset.fingerprint]
            return {REFERENCE: copied(table[batches.batch(step).example_indices], self.device)}
        is_ahead = batches is self._batches
        if not phase.is_fed or (is_ahead and self._lookahead is not None):
            return {}
        if is_ahead and step in self._next:
            return {REFERENCE: self._next.pop(step)}
        made = self.infer(phase, batches, step, _frozen(phase).role)
        return {REFERENCE: self._sum(phase, _part(made, batches, step))}

    def prepare(self, batches: Batches, step: int, num_steps: int) -> None:
        """Start preparing a step's inputs while the device computes, without waiting.

        With a feed ahead, the next step's rows are prepared too.
        """
        for number in range(step, min(num_steps, step + 1 + (self._batches is not None))):
            batches.prepare(number)
        if self._lookahead is not None and step < num_steps:
            self._lookahead.prepare(step)

    def end_step(self, step: int) -> None:
        """Sum the next step's column over the ranks that ran ahead. Collective."""
        if self._part is not None:
            self._next, self._part = {step + 1: _sum_everywhere(self._part)}, None

    def _training_runs(
        self,
        batches: Batches,
        step: int,
        group: _Group,
        losses: Mapping[str, Loss],
        table: Table,
    ) -> dict[str, ModelRun]:
        """Make the runs of colocated trained models, by role, with complete columns."""
        runs = {}
        for planned, context in group:
            rows = batches.seen_by(context).rows(step, self._reading(planned))
            columns = [table.of_row(row) for row in rows]
            finish = _finish(losses[planned.role], rows, columns)
            seed = self._seed, step
            runs[planned.role] = ModelRun(context, rows, finish, train=True, seed=seed)
        return runs

    def _warm_up(self, phase: Phase, batches: Batches, step: int, loss: Loss) -> None:
        """Run a step's passes once, model after model, and drop the results. Collective.

        Kernels and collectives are loaded, connected and given memory at their first run, which can
        block the whole device: do that here, not amid the transfers of a time-shared list.
        """
        if not self.is_cold:
            return
        self.is_cold = False
        assert isinstance(batches, DataBatches)
        (trained,) = phase.trained
        made = self.infer(phase, batches, step, _frozen(phase).role)
        column = self._sum(phase, _part(made, batches, step))
        table = Table(by_response={REFERENCE: column})
        group = [(trained, self.contexts[trained.role, trained.workload])]
        runs = self._training_runs(batches, step, group, {trained.role: loss}, table)
        execute(self._actions(phase, group, runs), runs)
        self.optimizers[trained.role].reduce_gradients()
        self.optimizers[trained.role].zero_grad()

    def _groups(self, phase: Phase, roles: Collection[str]) -> list[_Group]:
        """Group this rank's contexts of these roles by shared pipeline."""
        groups = []
        for colocated in phase.colocated:
            working = [(c, self.context(c)) for c in colocated if c.role in roles]
            groups.append([(planned, held) for planned, held in working if held is not None])
        return [group for group in groups if group]

    def _actions(
        self, phase: Phase, group: _Group, runs: Mapping[str, ModelRun]
    ) -> Sequence[Action]:
        working = [planned for planned, _ in group]
        return action_list(runs, self._costs(working) if phase.shares_time(working) else None)

    def _recorder(self, phase: Phase, group: _Group) -> list[Span] | None:
        return self._spans(phase, pass_name(phase, [planned for planned, _ in group]))

    def _sum(self, phase: Phase, part: torch.Tensor) -> torch.Tensor:
        """Sum the parts of a phase's frozen column over its ranks."""
        if phase.order == "concurrent":
            return _sum_everywhere(part)
        frozen = _frozen(phase)
        return self.contexts[frozen.role, frozen.workload].sum_over_ranks(part)


def pass_name(phase: Phase, group: Sequence[ContextPlan]) -> str:
    """Name an execution of colocated contexts in a phase: ``learn actor+critic``."""
    return f"{phase.name} {'+'.join(context.role for context in group)}"


def _frozen(phase: Phase) -> ContextPlan:
    """The frozen context of a phase, which feeds its trained one."""
    (planned,) = (planned for planned in phase.contexts if planned.workload != "train")
    return planned


def _sum_everywhere(part: torch.Tensor) -> torch.Tensor:
    """Sum over all ranks, which may arrive a whole step apart."""
    return sum_on_host(part.cpu()).to(part.device)


def _part(made: Mapping[str, Outputs], batches: DataBatches, step: int) -> torch.Tensor:
    """Collect a model's outputs for this rank's rows, [B, K]; zeros elsewhere."""
    (outputs,) = made.values()
    return outputs.by_response(batches.batch(step).num_examples, batches.dataset.num_responses)


def _keep(
    outputs: Outputs, rows: Sequence[RowInput], is_output_rank: bool
) -> Callable[[int, torch.Tensor], None]:
    """Make a ``finish`` that keeps a row's outputs on output ranks."""

    def finish(microbatch: int, output: torch.Tensor) -> None:
        if is_output_rank:
            outputs.rows.append((rows[microbatch], output))

    return finish


def _finish(
    loss: Loss, rows: Sequence[RowInput], columns: Sequence[Mapping[str, torch.Tensor]]
) -> Callable[[int, torch.Tensor], torch.Tensor]:
    """Make a ``finish`` that computes a row's loss."""

    def finish(microbatch: int, outputs: torch.Tensor) -> torch.Tensor:
        return loss(rows[microbatch], outputs, columns[microbatch])

    return finish
