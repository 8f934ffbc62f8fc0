"""The data of a preference stage: tokenizer, train and held-out pairs, loaders for every model."""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from puzzle_align.config.job import JobConfig
from puzzle_align.config.resolve import resolve_role_spec, role_model, role_names
from puzzle_align.data.dataset import ExampleDataset
from puzzle_align.data.loader import ExampleLoader
from puzzle_align.data.packing import Rows
from puzzle_align.data.prepare import PreparedData, prepare_data
from puzzle_align.data.tokenize import Tokenizer
from puzzle_align.runtime.context import Context
from puzzle_align.runtime.groups import World
from puzzle_align.runtime.reduce import from_rank_zero
from puzzle_align.stages.data_view import DataView, data_view
from puzzle_align.stages.inputs import cache_folder
from puzzle_align.stages.preference.objective import objective_of
from puzzle_align.stages.tokenizer import check_vocabulary, open_tokenizer

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PreferenceData:
    """What a preference stage trains and evaluates on."""

    train: ExampleDataset
    held_out: ExampleDataset | None
    rows: Rows | None  # ready-made rows of packed files
    cache_folder: Path
    summary: str  # of what was read, for people

    def datasets(self) -> list[ExampleDataset]:
        """Train and, where there is one, held-out data."""
        return [self.train] if self.held_out is None else [self.train, self.held_out]


def open_data(config: JobConfig, world: World) -> PreferenceData:
    """Tokenize (or find in the cache) on rank 0, then open on every rank. Collective.

    Raises:
        ValueError: one line, for bad data or a tokenizer with more tokens than a role's model.
    """
    tokenizer = open_tokenizer(config)
    for role in role_names(config):
        _, key = role_model(config, role)
        check_vocabulary(tokenizer, resolve_role_spec(config, role), key)
    progress = config.telemetry.progress
    summary = from_rank_zero(lambda: job_pairs(config, tokenizer, progress=progress).summary)
    if world.rank == 0:
        _logger.info("%s", summary)
    return job_pairs(config, tokenizer)


def job_pairs(config: JobConfig, tokenizer: Tokenizer, *, progress: bool = False) -> PreferenceData:
    """The job's pairs, tokenized here or before. ValueError, one line, for bad data."""
    data = prepare_data(
        config.data,
        config.packing,
        tokenizer,
        add_eos=config.tokenizer.add_eos,
        seed=config.seed,
        cache_dir=cache_folder(config),
        margins=objective_of(config).reads_margins,
        progress=progress,
    )
    return PreferenceData(data.train, data.eval, data.rows, cache_folder(config), _summary(data))


def _summary(data: PreparedData) -> str:
    """What was read, in one line."""
    line = f"data: {data.report.summary()}"
    if data.eval is None:
        return line
    if data.eval_report is not None:
        return f"{line}; held out: {data.eval_report.summary()}"
    return f"{line}; {len(data.eval)} of them held out"


def train_loader(config: JobConfig, data: PreferenceData, view: DataView) -> ExampleLoader:
    """The training pairs in global batches."""
    return ExampleLoader(
        data.train,
        **_row_settings(config),
        **view,
        scope=config.packing.scope,
        shuffle=config.data.shuffle,
        rows=data.rows,
    )


def total_steps(config: JobConfig, loader: ExampleLoader) -> int:
    """Optimizer steps of the whole job: ``max_steps``, else by epochs."""
    if config.max_steps > 0:
        return config.max_steps
    return config.num_train_epochs * loader.steps_per_epoch


def eval_loader(config: JobConfig, dataset: ExampleDataset, context: Context) -> ExampleLoader:
    """Every pair of ``dataset`` once, in its own order, for this rank of ``context``."""
    return ExampleLoader(
        dataset, **_row_settings(config), **data_view(context), scope="batch", shuffle=False
    )


def _row_settings(config: JobConfig) -> dict[str, Any]:
    return {
        "global_batch_size": config.global_batch_size,
        "row_tokens": config.packing.row_tokens,
        "layout": config.packing.row_layout,
        "packed": config.packing.is_packed,
        "seed": config.seed,
    }
