"""What a step on preference pairs has to do, from the pairs' lengths."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from puzzle_align.config.job import JobConfig
from puzzle_align.config.roles import tokenizer_config
from puzzle_align.data.loader import ExampleLoader, plan_view
from puzzle_align.layout.plan import ParallelPlan
from puzzle_align.planning.load import Load
from puzzle_align.stages.load import NUM_SAMPLED_STEPS, rows_of
from puzzle_align.stages.preference.data import job_pairs, total_steps, train_loader
from puzzle_align.stages.tokenizer import open_tokenizer


def job_load(config: JobConfig, _response_tokens: float | None = None) -> Load:
    """The job's steps, in the mean over some of its first epoch.

    Raises:
        ValueError: one line, for bad data.
    """
    data = job_pairs(
        config, open_tokenizer(tokenizer_config(config)), progress=config.telemetry.progress
    )

    def loader(row_tokens: int) -> ExampleLoader:
        packing = replace(config.packing, row_tokens=row_tokens)
        view = plan_view(ParallelPlan(), data_rank=0)
        return train_loader(replace(config, packing=packing), data, view)

    def sampled(row_tokens: int, _batches: int) -> tuple[ExampleLoader, Sequence[int]]:
        made = loader(row_tokens)
        last = made.steps_per_epoch - 1
        steps = np.unique(np.linspace(0, last, NUM_SAMPLED_STEPS, dtype=np.int64))
        return made, steps.tolist()

    usual = loader(config.packing.row_tokens)
    return Load(
        rows=rows_of(sampled),
        num_examples=config.global_batch_size,
        num_iterations=total_steps(config, usual),
        least_row_tokens=usual.longest_example,
    )
