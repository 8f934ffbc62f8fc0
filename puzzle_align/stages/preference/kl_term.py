"""KTO's reference point: how far the policy is from its reference, before a step is trained on.

Both run over the batch's prompts with each other's responses, as the plan's phase ``kl`` says: in
one pipeline where they can, else one after the other, or side by side.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import lcm

import torch

from puzzle_align.algos.kto import kl_divergence
from puzzle_align.config.job import JobConfig
from puzzle_align.config.roles import reference_loss
from puzzle_align.config.sections.preference import KTOConfig
from puzzle_align.data.loader import ExampleLoader
from puzzle_align.layout.job_plan import ContextPlan, JobPlan
from puzzle_align.layout.rows import SLOT_MULTIPLE
from puzzle_align.runtime.ahead import Ahead
from puzzle_align.runtime.context import Context
from puzzle_align.runtime.executor import ModelRun
from puzzle_align.runtime.groups.collectives import sum_over_world
from puzzle_align.runtime.passes import run_together, sum_responses
from puzzle_align.runtime.row_input import RowInput, to_device
from puzzle_align.stages.costs import job_costs
from puzzle_align.stages.data_view import data_view, plan_view

_ROLES = ("actor", "reference")


@dataclass(frozen=True)
class _Mismatched:
    """A batch's prompts with each other's responses."""

    num_responses: int
    rows: list[list[RowInput]]  # this rank's, of each group of colocated models


class KLTerm:
    """Estimates the divergence of one batch after the other."""

    def __init__(
        self,
        config: JobConfig,
        plan: JobPlan,
        contexts: Mapping[str, Context],
        device: torch.device,
    ) -> None:
        """``contexts`` are this rank's, by role."""
        self._phase = plan.phase("kl")
        self._costs = job_costs(config).of(self._phase.contexts)
        self._contexts = contexts
        self._device = device
        self._longest = longest_mismatched(config, plan)
        self._groups = [own for own in self._phase.colocated if own[0].role in contexts]
        self._mismatched = Ahead(self._make, device)

    def estimate(self, loader: ExampleLoader, step: int) -> float:
        """The divergence of a step's batch, the same on all ranks. Collective over the world.

        Args:
            loader: of the batch, as any plan splits it.
        """
        mismatched = self._mismatched.of((loader, step))
        shape = len(_ROLES), mismatched.num_responses
        table = torch.zeros(shape, dtype=torch.float64, device=self._device)
        for group, rows in zip(self._groups, mismatched.rows, strict=True):
            self._run(group, rows, table)
        # A response is on one output rank of a model: adding zeros puts the table together.
        return kl_divergence(*sum_over_world(table))

    def prepare(self, loader: ExampleLoader, step: int) -> None:
        """Have what ``estimate`` will run over made; do not wait for it."""
        self._mismatched.prepare((loader, step))

    def _make(self, key: tuple[ExampleLoader, int]) -> _Mismatched:
        loader, step = key
        mismatched = loader.mismatched(step, self._longest)
        rows = []
        for group in self._groups:
            view = mismatched.seen_by(**data_view(self._contexts[group[0].role]))
            attention, microbatches = group[0].options.attention, view.batch(0).microbatches
            rows.append([to_device(m, attention, self._device) for m in microbatches])
        return _Mismatched(len(mismatched.dataset), rows)

    def _run(
        self, group: Sequence[ContextPlan], rows: Sequence[RowInput], table: torch.Tensor
    ) -> None:
        """Colocated models, over this rank's rows."""
        contexts = {own.role: self._contexts[own.role] for own in group}
        runs = {
            role: ModelRun(context, rows, _note(context, rows, table[_ROLES.index(role)]), False)
            for role, context in contexts.items()
        }
        shared = self._phase.shares_time(group)
        run_together(runs, costs=self._costs if shared else None)


def kl_term(
    config: JobConfig, plan: JobPlan, contexts: Mapping[str, Context], device: torch.device
) -> KLTerm | None:
    """The job's; None where its loss has none."""
    loss = reference_loss(config)
    if isinstance(loss, KTOConfig) and loss.estimates_kl:
        return KLTerm(config, plan, contexts, device)
    return None


def longest_mismatched(config: JobConfig, plan: JobPlan) -> int:
    """Tokens of a prompt with another's response: as many as with its own may be.

    Of packed files, which were cut by another config, those of a row.
    """
    if config.data.format != "packed":
        return config.data.max_length
    views = [plan_view(own.plan, data_rank=0) for own in plan.phase("kl").contexts]
    unit = lcm(SLOT_MULTIPLE, *(view["sequence_multiple"] for view in views))
    return config.packing.row_tokens // unit * unit


def _note(
    context: Context, rows: Sequence[RowInput], column: torch.Tensor
) -> Callable[[int, torch.Tensor], None]:
    """Takes a row's log-probabilities, summed by response, where this is their output rank."""

    def finish(microbatch: int, outputs: torch.Tensor) -> None:
        if context.is_output_rank:
            row = rows[microbatch]
            sums = sum_responses(row, outputs if outputs.dim() == 1 else outputs[0])
            column[row.examples] = sums[:, 0]

    return finish
