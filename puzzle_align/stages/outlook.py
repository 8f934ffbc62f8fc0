"""Description of a job's work before it runs: for validation, pictures, profiles and the planner.

``outlook`` in ``preference.outlook`` and ``rl.outlook`` takes the config of a resolved ``Job``.
Everything is derived from the phases of the job's plan and rows of the job's data.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import import_module
from math import ceil, inf
from statistics import fmean
from typing import Any

import numpy as np
import torch

from puzzle_align.config.job import JobConfig
from puzzle_align.config.sections.optimizer import OptimizerConfig
from puzzle_align.config.stages import PROMPTS
from puzzle_align.data.dataset import ExampleDataset, from_examples
from puzzle_align.data.loader import DataView, ExampleLoader, collate_row, plan_view
from puzzle_align.data.prompts import PromptDataset
from puzzle_align.data.tokenize import Tokenizer
from puzzle_align.layout.job_plan import JobPlan, Phase, Workload
from puzzle_align.layout.plan import ParallelPlan
from puzzle_align.layout.rows import Microbatch, RowLayout
from puzzle_align.planning.costs.measured import RowShape
from puzzle_align.planning.load import Load, PassLoad, RowsOf
from puzzle_align.planning.memory.job import GenerationSizes
from puzzle_align.planning.prediction import PredictedRun
from puzzle_align.planning.profiled_rows import ExampleSize, Lengths
from puzzle_align.runtime.row_input import Reading, RowInput
from puzzle_align.schedules.registry import schedule_named
from puzzle_align.stages.costs import job_costs, predicted_run, same_in_every_pass

NUM_SAMPLED_STEPS = 16  # steps over which a planner's load is the mean
# Microbatches for each pipeline rank and chunk in a memory estimate: further ones repeat the steady
# state, in which memory no longer grows.
_NUM_PROVEN = 4

# (tokens of a row, batches of an iteration) -> a loader of these rows, and some of its steps.
LoaderOf = Callable[[int, int], tuple[ExampleLoader, Sequence[int]]]
RowLoss = Callable[[RowInput, torch.Tensor], torch.Tensor]  # (row, a model's outputs) -> loss


@dataclass(frozen=True)
class Preview:
    """Lines to print, tokenized data to check, and inputs of the memory estimate.

    ``runs``: a pass of every phase that has action lists, with the most microbatches possible;
    empty if the job has no plan.
    """

    lines: list[str] = field(default_factory=list)
    datasets: Sequence[ExampleDataset | PromptDataset] = ()
    runs: list[PredictedRun] = field(default_factory=list)
    generation: GenerationSizes | None = None


class Outlook(ABC):
    """Description of a job's work; a subclass knows one kind of data."""

    statistics = False  # whether trained models' outputs include statistics

    def __init__(self, config: JobConfig) -> None:
        """``config`` is a resolved job's."""
        self.config = config

    @abstractmethod
    def preview(
        self, plan: JobPlan | None, tokenizer: Tokenizer | None, problems: list[str]
    ) -> Preview:
        """Describe data, steps and phases.

        Args:
            plan: None if the job has problems.
            tokenizer: None if it cannot be opened, or the data's keys are wrong.
            problems: of the job; faults of its data are added.
        """

    @abstractmethod
    def work(self, plan: JobPlan, data: Any, problems: list[str]) -> Preview:
        """Describe steps, rows and phases; ``data`` is the stage's, None if it cannot be read."""

    @abstractmethod
    def counted_runs(self, plan: JobPlan) -> list[PredictedRun]:
        """Runs of the phases with the microbatches of the job's data. ValueError for bad data."""

    @abstractmethod
    def load(self, response_tokens: float | None = None) -> Load:
        """Compute the work of an iteration from the lengths of the data. ValueError for bad data.

        Args:
            response_tokens: mean length of a sampled response; None: the longest possible.
        """

    @abstractmethod
    def drawn_row(self) -> RowLayout:
        """Layout of a row of the job's data, of the first step. ValueError for bad data."""

    @abstractmethod
    def example_size(self) -> ExampleSize:
        """Lengths of the job's examples. ValueError, one line, for bad data."""

    @abstractmethod
    def reading(self, role: str, workload: Workload) -> Reading:
        """Reading of rows by a role's model."""

    @abstractmethod
    def row_loss(self, role: str, microbatch: Microbatch, device: torch.device) -> RowLoss | None:
        """Loss of a role on one row, its columns zeros; None for a role that is not trained."""

    def assumptions(self) -> list[str]:
        """Lines on what ``counted_runs`` assumes of the data; empty if it reads them."""
        return []

    def runs(self, plan: JobPlan, num_rows: int, num_passes: int = 1) -> list[PredictedRun]:
        """Runs of the phases of an iteration, if a pass that trains has ``num_rows`` rows.

        The other passes have the rows of all mini-batches.
        """
        costs, parts = job_costs(self.config), self.config.ppo.num_mini_batches
        rows = {phase: num_rows * (1 if phase.trained else parts) for phase in scheduled(plan)}
        return [
            predicted_run(costs, phase, same_in_every_pass(phase, number), num_passes)
            for phase, number in rows.items()
        ]

    def runs_of(self, plan: JobPlan, num_microbatches: int, num_passes: int) -> list[PredictedRun]:
        """Runs of the phases, given the microbatches of a pass of the first trained model.

        Raises:
            ValueError: one line, if the number is impossible for a trained model's pass.
        """
        trained = next(iter(plan.trained.values())).plan
        for context in plan.trained.values():
            multiple = context.plan.microbatch_multiple
            if num_microbatches % multiple:
                raise ValueError(
                    f"--microbatches {num_microbatches}: with model chunks a step takes a multiple"
                    f" of the {multiple} pipeline ranks; choose one"
                )
        return self.runs(plan, num_microbatches * trained.data, num_passes)


def scheduled(plan: JobPlan) -> list[Phase]:
    """Phases of an iteration that run by action lists: all but sampling."""
    return [
        phase
        for phase in plan.phases
        if not phase.once and all(c.workload != "generate" for c in phase.contexts)
    ]


def plural(number: int | str) -> str:
    """Format a count: ``1 microbatch``, ``4 microbatches``."""
    return f"{number} microbatch{'es' * (str(number) != '1')}"


def phase_line(phase: Phase, counts: Mapping[str, int] | None = None) -> str:
    """Describe a phase: its models, their order, and the microbatches of each.

    ``counts`` are by role; None leaves them out.
    """
    groups: list[str] = []
    for group in phase.colocated:
        first, *others = group
        roles = ", ".join(context.role for context in group)
        if others and len(phase.colocated) > 1:
            roles += " time-shared" if phase.shares_time(group) else " one after the other"
        number = None if counts is None else plural(counts[first.role])
        groups.append(roles if number is None else f"{roles} ({number})")
    order = f", {phase.order}" if len(phase.contexts) > 1 else ""
    return f"{phase.name}{order}: {'; '.join(groups)}"


def proven_rows(plan: ParallelPlan) -> float:
    """Rows of a pass beyond which memory stops growing; infinite if it never stops."""
    if schedule_named(plan.schedule, plan.virtual_pipeline).holds_all:
        return inf
    return _NUM_PROVEN * plan.pipeline * plan.virtual_pipeline * plan.data


def with_rows(config: JobConfig, row_tokens: int) -> JobConfig:
    """The job with rows of so many tokens."""
    return replace(config, packing=replace(config.packing, row_tokens=row_tokens))


def rows_of(loader_of: LoaderOf) -> RowsOf:
    """Mean load of the passes in the steps that ``loader_of`` names."""
    loader_of = cache(loader_of)

    @cache
    def seen_by(row_tokens: int, batches: int, view: DataView) -> PassLoad:
        loader, steps = loader_of(row_tokens, batches)
        data, multiple = view.data_size, view.microbatch_multiple
        seen = loader.seen_by(view)
        contents = [seen.row_contents(step) for step in steps]
        places = [max(1, ceil(c.num_rows / (data * multiple))) * multiple for c in contents]
        steps_rows = list(zip(contents, places, strict=True))
        num_rows = sum(places) * data  # rows, including empty ones
        padding = sum(
            c.num_rows * c.padding_pairs
            + (n * data - c.num_rows) * c.num_tokens * (c.num_tokens + 1) / 2
            for c, n in steps_rows
        )
        shape = RowShape(
            row_tokens=round(sum(n * c.num_tokens for c, n in steps_rows) / sum(places)),
            pairs=sum(c.num_rows * c.pairs for c in contents) / num_rows,
            padding_pairs=padding / num_rows,
            predictions=sum(c.num_rows * c.predictions for c in contents) / num_rows,
        )
        return PassLoad(microbatches=fmean(places), row=shape)

    def rows(row_tokens: int, batches: int, plan: ParallelPlan) -> PassLoad:
        return seen_by(row_tokens, batches, plan_view(plan))

    return rows


def microbatch_of(row: Sequence[Lengths], row_layout: str, vocab_size: int) -> Microbatch:
    """Make a row of random tokens below ``vocab_size``, without padding."""
    generator = np.random.default_rng(0)

    def tokens(number: int) -> list[int]:
        return generator.integers(0, vocab_size, number).tolist()

    dataset = from_examples(
        ((tokens(prompt), [tokens(length) for length in responses]) for prompt, responses in row),
        pad_id=0,
    )
    everyone = np.arange(len(dataset))
    copies = 1 if row_layout == "shared" else dataset.num_responses
    num_tokens = sum(copies * prompt + sum(responses) for prompt, responses in row)
    return collate_row(dataset, everyone, everyone, layout=row_layout, num_tokens=num_tokens)


def warm_up_lines(key: str, optimizer: OptimizerConfig, num_updates: int) -> list[str]:
    """Warning of a warm-up that is longer than the optimizer's steps in a run, if it is."""
    if optimizer.warmup_steps <= num_updates:
        return []
    return [
        f"warning: {key}.warmup_steps={optimizer.warmup_steps}, but this optimizer takes "
        f"{num_updates} steps in the run: the learning rate never reaches {key}.lr={optimizer.lr}"
    ]


def open_outlook(config: JobConfig) -> Outlook:
    """Open the outlook of a job's stage, of its own module: a trainer's imports Megatron."""
    folder = "rl" if config.stage in PROMPTS else "preference"
    return import_module(f"puzzle_align.stages.{folder}.outlook").outlook(config)
