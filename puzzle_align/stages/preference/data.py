"""Data of a preference stage: train and held-out data, warnings, loaders for every model."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from puzzle_align.config.job import JobConfig
from puzzle_align.config.resolve import Job
from puzzle_align.config.sections.preference import KTOConfig
from puzzle_align.config.stages import UNPAIRED
from puzzle_align.data.build import Preparation
from puzzle_align.data.dataset import ExampleDataset
from puzzle_align.data.loader import DataView, ExampleLoader
from puzzle_align.data.prepare import Prepared, prepare_data
from puzzle_align.data.tokenize import Tokenizer
from puzzle_align.stages.data import open_everywhere, preparation
from puzzle_align.stages.preference.objective import objective_of
from puzzle_align.stages.tokenizer import open_tokenizer


def open_data(job: Job) -> Prepared[ExampleDataset]:
    """Tokenize on rank 0, open on every rank (``open_everywhere``). Collective."""
    tokenizer = open_tokenizer(job.tokenizer)
    read = partial(job_pairs, job.config, tokenizer)
    return open_everywhere(job, tokenizer, read, partial(data_warnings, job.config))


def job_pairs(
    config: JobConfig, tokenizer: Tokenizer, how: Preparation | None = None
) -> Prepared[ExampleDataset]:
    """Open the job's data; tokenize them if they are not cached. ValueError, one line, if bad."""
    objective = objective_of(config)
    data = prepare_data(
        config.data,
        config.packing,
        tokenizer,
        how or preparation(config),
        add_eos=config.tokenizer.add_eos,
        seed=config.seed,
        margins=objective.reads_margins,
        unpaired=config.stage in UNPAIRED,
    )
    key = None
    if objective.reading.tail_weight is not None:
        key = "dpo.ld_alpha"
    elif objective.reading.predict_prompts:
        key = "dpo.nll_scope=sequence"
    for name, dataset in data.datasets().items():
        if key is not None and dataset.levels is not None:
            raise ValueError(
                f"{key}: needs pairs, but {name} has more than two responses to a prompt; "
                "leave the key out, or write the pairs as chosen and rejected"
            )
    return data


def data_warnings(config: JobConfig, data: Prepared[ExampleDataset]) -> Iterator[str]:
    """Yield warnings on the data, a line each."""
    if objective_of(config).reads_ends:
        yield from _cut_responses(data)
    yield from _weights(config, data.train)
    no_prompt = int(np.count_nonzero(data.train.prompt_lengths <= 1))  # at most a first token
    if 2 * no_prompt > len(data.train):
        yield (
            f"{no_prompt} of {len(data.train)} prompts are empty; if the data have them in a "
            "column of another name, set data.columns.prompt to it"
        )
    if config.telemetry.eval_every and data.eval is None:
        yield (
            f"telemetry.eval_every: {config.telemetry.eval_every}, but no data are held out to "
            "evaluate on; set data.eval, or data.eval_fraction above 0"
        )


def _cut_responses(data: Prepared[ExampleDataset]) -> Iterator[str]:
    """Yield a warning for every source with truncated responses."""
    for name, report in (("data", data.report), ("data.eval", data.eval_report)):
        if report is not None and report.num_cut_responses:
            yield (
                f"{name}: {report.num_cut_responses} of {report.num_used} pairs have a cut "
                "response, whose last token is not its end: the model learns to score it there; "
                "raise data.max_length, or leave such pairs out with data.truncation_mode=drop"
            )


def _weights(config: JobConfig, train: ExampleDataset) -> Iterator[str]:
    """Yield a warning if desirable and undesirable responses have unbalanced total weights.

    TRL warns alike: KTO's paper has 1 to 4/3 times the weight on desirable ones (equation 8).
    """
    loss = config.reference_loss
    if not isinstance(loss, KTOConfig):
        return
    desirable = int(train.labels_of(np.arange(len(train))).sum())
    others = len(train) - desirable
    desirable_total = loss.desirable_weight * desirable
    undesirable_total = loss.undesirable_weight * others
    if not desirable_total or not undesirable_total:
        kind = "desirable" if desirable_total else "undesirable"
        yield f"only {kind} responses train the policy: nothing limits how far it moves"
    elif desirable != others and not 0.99 <= desirable_total / undesirable_total <= 1.34:
        least, most = undesirable_total / desirable, 4 / 3 * undesirable_total / desirable
        yield (
            f"{desirable} responses are desirable and {others} are not, and their weights do not "
            "make up for it: KTO's paper would have kto.desirable_weight from "
            f"{least:.2f} to {most:.2f}, or kto.undesirable_weight from "
            f"{0.75 * desirable_total / others:.2f} to {desirable_total / others:.2f}"
        )


def train_loader(
    config: JobConfig, data: Prepared[ExampleDataset], view: DataView
) -> ExampleLoader:
    """Load the training examples in global batches."""
    return ExampleLoader(
        data.train,
        **_row_settings(config),
        view=view,
        scope=config.packing.scope,
        shuffle=config.data.shuffle,
        rows=data.rows,
    )


def total_steps(config: JobConfig, loader: ExampleLoader) -> int:
    """Optimizer steps of the whole job: ``max_steps``, else from epochs."""
    if config.max_steps > 0:
        return config.max_steps
    return config.num_train_epochs * loader.steps_per_epoch


def eval_loader(config: JobConfig, dataset: ExampleDataset, view: DataView) -> ExampleLoader:
    """Load every example of ``dataset`` once, always in the same order.

    Pairs keep the order of the data. Single responses are shuffled: in the data, responses to a
    prompt are often neighbours, and KTO's mismatched rows need neighbours with other prompts.
    """
    mixed = config.stage in UNPAIRED
    return ExampleLoader(dataset, **_row_settings(config), view=view, scope="batch", shuffle=mixed)


def _row_settings(config: JobConfig) -> dict[str, Any]:
    return {
        "global_batch_size": config.global_batch_size,
        "row_tokens": config.packing.row_tokens,
        "layout": config.packing.row_layout,
        "packed": config.packing.is_packed,
        "seed": config.seed,
    }
