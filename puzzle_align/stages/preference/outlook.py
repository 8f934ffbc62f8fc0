"""Outlook of a job on preference data: steps, microbatches, rows."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property, partial

import numpy as np
import torch

from puzzle_align.config.job import JobConfig
from puzzle_align.data.dataset import ExampleDataset
from puzzle_align.data.loader import ExampleLoader, plan_view
from puzzle_align.data.packing import example_lengths
from puzzle_align.data.prepare import Prepared
from puzzle_align.data.tokenize import Tokenizer
from puzzle_align.layout.job_plan import JobPlan, Workload
from puzzle_align.layout.plan import ParallelPlan
from puzzle_align.layout.rows import SLOT_MULTIPLE, Microbatch, RowLayout
from puzzle_align.planning.load import Load
from puzzle_align.planning.prediction import PredictedRun
from puzzle_align.planning.profiled_rows import ExampleSize
from puzzle_align.runtime.columns import REFERENCE
from puzzle_align.runtime.row_input import Reading
from puzzle_align.stages.costs import counted, job_costs, predicted_run
from puzzle_align.stages.inputs import attempt
from puzzle_align.stages.outlook import (
    NUM_SAMPLED_STEPS,
    Outlook,
    Preview,
    RowLoss,
    phase_line,
    proven_rows,
    rows_of,
    scheduled,
    warm_up_lines,
    with_rows,
)
from puzzle_align.stages.preference.data import data_warnings, job_pairs, total_steps, train_loader
from puzzle_align.stages.preference.objective import (
    ExampleLoss,
    Objective,
    num_responses,
    objective_of,
)
from puzzle_align.stages.tokenizer import open_tokenizer
from puzzle_align.telemetry.text import length_lines

_NUM_COUNTED_STEPS = 32  # over which fill and microbatches are counted
_logger = logging.getLogger(__name__)


class PreferenceOutlook(Outlook):
    """Outlook of the stages dpo, kto and reward."""

    @cached_property
    def objective(self) -> Objective:
        """Objective of the stage; ValueError, one line, if its loss is a wrong function."""
        return objective_of(self.config)

    @property
    def statistics(self) -> bool:
        """Whether trained models' outputs include statistics."""
        return self.objective.statistics

    def preview(
        self, plan: JobPlan | None, tokenizer: Tokenizer | None, problems: list[str]
    ) -> Preview:
        """Describe data, steps and phases."""
        lines: list[str] = []
        attempt(problems, lambda: self.objective)
        data = None if tokenizer is None else self._described_data(tokenizer, problems, lines)
        datasets = () if data is None else tuple(data.datasets().values())
        if plan is None:
            return Preview(lines, datasets)
        work = self.work(plan, data, problems)
        return replace(work, lines=lines + work.lines, datasets=datasets)

    def work(
        self, plan: JobPlan, data: Prepared[ExampleDataset] | None, problems: list[str]
    ) -> Preview:
        """Describe steps, rows and phases."""
        config, lines = self.config, []
        trained = plan.phase("train").trained[0].plan
        longest = num_responses(config) if data is None else data.train.num_responses
        num_microbatches = -(-most_rows(config, longest) // trained.data)
        loader = None
        if data is not None:
            loader = attempt(problems, lambda: train_loader(config, data, plan_view(trained)))
        if loader is not None:
            in_data = self._count_steps(loader, lines)
            if in_data < num_microbatches:
                lines.append(
                    f"memory is for {num_microbatches} of them, as many as examples of "
                    f"data.max_length={config.data.max_length} take"
                )
            num_microbatches = max(num_microbatches, in_data)
        num_rows = int(min(num_microbatches * trained.data, proven_rows(trained)))
        lines += map(phase_line, plan.phases)
        return Preview(lines, runs=self.runs(plan, num_rows, num_passes=2))

    def counted_runs(self, plan: JobPlan) -> list[PredictedRun]:
        """Runs of the job's training steps, by phase."""
        trained, costs = plan.phase("train").trained[0].plan, job_costs(self.config)
        loader = train_loader(self.config, self._data(), plan_view(trained))
        num_passes = total_steps(self.config, loader)
        return [predicted_run(costs, p, counted(loader, p), num_passes) for p in scheduled(plan)]

    def load(self, _response_tokens: float | None = None) -> Load:
        """Mean load of some steps of the first epoch."""
        config, data = self.config, self._data()

        def loader(row_tokens: int) -> ExampleLoader:
            return train_loader(with_rows(config, row_tokens), data, plan_view(ParallelPlan()))

        def sampled(row_tokens: int, _batches: int) -> tuple[ExampleLoader, Sequence[int]]:
            made = loader(row_tokens)
            last = made.steps_per_epoch - 1
            steps = np.unique(np.linspace(0, last, NUM_SAMPLED_STEPS, dtype=np.int64))
            return made, steps.tolist()

        usual = loader(config.packing.row_tokens)
        # The job refuses rows below data.max_length, whatever the data's longest example.
        unit = 1 if config.packing.is_packed else SLOT_MULTIPLE
        allowed = -(-config.data.max_length // unit) * unit
        num_steps = total_steps(config, usual)
        every = config.telemetry.eval_every or num_steps
        num_evaluations = 1 + len({*range(every, num_steps, every), num_steps})
        held_out = 0 if data.eval is None else len(data.eval) / config.global_batch_size
        return Load(
            rows=rows_of(sampled),
            most_rows=lambda row_tokens: most_rows(
                with_rows(config, row_tokens), data.train.num_responses
            ),
            num_examples=config.global_batch_size,
            num_iterations=num_steps,
            least_row_tokens=max(usual.longest_example, allowed),
            fixed_row_tokens=config.packing.row_tokens if usual.has_ready_rows else None,
            data_batches=len(data.train) / config.global_batch_size + held_out,
            held_out_batches=held_out,
            num_evaluations=num_evaluations,
        )

    def drawn_row(self) -> RowLayout:
        """Layout of a row that the first step trains on."""
        loader = train_loader(self.config, self._data(), plan_view(ParallelPlan()))
        return loader.batch(0).microbatches[0].layout

    def example_size(self) -> ExampleSize:
        """Mean lengths of the training data; if they cannot be read, half prompt and half response
        of the longest example that the config allows.
        """
        config = self.config
        try:
            train = self._data().train
        except (OSError, ValueError) as error:
            half = max(1, config.data.max_length // 2)
            size = ExampleSize(prompt=half, responses=(half,) * num_responses(config), longest=0)
            _logger.warning("the rows are of prompts and responses of %d tokens: %s", half, error)
            return replace(size, longest=size.tokens(config.packing.row_layout))
        lengths = example_lengths(
            train.prompt_lengths, train.response_lengths, config.packing.row_layout
        )
        return ExampleSize(
            prompt=max(1, round(float(train.prompt_lengths.mean()))),
            responses=tuple(
                max(1, round(mean)) for mean in train.response_lengths.mean(axis=0).tolist()
            ),
            longest=int(lengths.max()),
        )

    def reading(self, _role: str, _workload: Workload) -> Reading:
        """Return the reading that all models of the stage share."""
        return self.objective.reading

    def row_loss(self, _role: str, microbatch: Microbatch, device: torch.device) -> RowLoss:
        """Return the stage's loss, against zeros: its time does not depend on values."""
        num_examples = len(np.unique(microbatch.example_ids))
        shape = num_examples, microbatch.num_branches
        reference = torch.zeros(shape, dtype=torch.float64, device=device)
        values = reference.new_zeros(num_examples, self.objective.num_values)
        return partial(ExampleLoss(self.objective, values, 1.0), columns={REFERENCE: reference})

    def _data(self) -> Prepared[ExampleDataset]:
        """Open the data; tokenize them if they are not in the cache."""
        tokenizer = open_tokenizer(self.config.tokenizer)
        return job_pairs(self.config, tokenizer)

    def _described_data(
        self, tokenizer: Tokenizer, problems: list[str], lines: list[str]
    ) -> Prepared[ExampleDataset] | None:
        """Open the data and describe them; None if they cannot be read."""
        config = self.config
        data = attempt(problems, lambda: job_pairs(config, tokenizer))
        if data is not None:
            layout = config.packing.row_layout
            prompts, responses = data.train.prompt_lengths, data.train.response_lengths
            whole = "both" if data.train.num_responses == 1 else f"pair, {layout}"
            if data.train.levels is not None:
                responses, whole = responses[responses > 0], f"ranking, {layout}"
            lengths = {
                "prompt": prompts,
                "response": responses,
                whole: example_lengths(prompts, data.train.response_lengths, layout),
            }
            lines += [data.summary, *(f"warning: {line}" for line in data_warnings(config, data))]
            lines += length_lines(lengths)
        return data

    def _count_steps(self, loader: ExampleLoader, lines: list[str]) -> int:
        """Describe steps, microbatches and fill; return a replica's most microbatches in a step."""
        per_epoch = loader.steps_per_epoch
        sampled = np.unique(np.linspace(0, per_epoch - 1, _NUM_COUNTED_STEPS, dtype=np.int64))
        batches = [loader.batch(int(step)) for step in sampled]
        counts = [len(batch.microbatches) for batch in batches]
        fewest, most = min(counts), max(counts)
        fill = sum(b.num_tokens for b in batches) / sum(b.num_row_tokens for b in batches)
        microbatches = f"{most}" if fewest == most else f"{fewest} to {most}"
        unit = "responses" if loader.dataset.num_responses == 1 else "pairs"
        if loader.dataset.levels is not None:
            per = loader.dataset.num_comparisons(np.arange(len(loader.dataset)))
            unit = f"rankings (of {per / len(loader.dataset):.1f} comparisons on average)"
        number = total_steps(self.config, loader)
        lines.append(
            f"steps: {number} ({per_epoch} an epoch), each of {self.config.global_batch_size} "
            f"{unit}"
        )
        lines += warm_up_lines("optimizer", self.config.optimizer, number)
        lines.append(
            f"microbatches of a step and data rank: {microbatches}; fill {100 * fill:.1f}%"
        )
        return most


def most_rows(config: JobConfig, num_responses: int) -> int:
    """Rows of a global batch if all examples have the greatest length."""
    longest = min(num_responses * config.data.max_length, config.packing.row_tokens)
    return -(-config.global_batch_size // (config.packing.row_tokens // longest))


outlook = PreferenceOutlook  # read by ``stages.outlook``
