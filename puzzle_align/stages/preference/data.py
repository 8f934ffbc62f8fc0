"""The data of a preference stage: tokenizer, train and held-out data, loaders for every model."""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from puzzle_align.config.job import JobConfig
from puzzle_align.config.resolve import Job
from puzzle_align.config.roles import reference_loss
from puzzle_align.config.sections.preference import KTOConfig
from puzzle_align.config.stages import STAGES
from puzzle_align.data.dataset import ExampleDataset
from puzzle_align.data.loader import DataView, ExampleLoader
from puzzle_align.data.packing import Rows
from puzzle_align.data.prepare import PreparedData, prepare_data
from puzzle_align.data.sources import hash_source, hash_sources
from puzzle_align.data.tokenize import Tokenizer
from puzzle_align.runtime.groups.collectives import from_rank_zero, on_other_nodes
from puzzle_align.runtime.groups.world import World
from puzzle_align.stages.inputs import cache_folder, check_same
from puzzle_align.stages.preference.objective import objective_of
from puzzle_align.stages.tokenizer import (
    check_tokens,
    check_vocabulary,
    open_tokenizer,
    vocabularies,
)

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PreferenceData:
    """Training and held-out data of a preference stage."""

    train: ExampleDataset
    held_out: ExampleDataset | None
    rows: Rows | None  # ready-made rows of packed files
    cache_folder: Path
    summary: str  # of the data, to be logged
    warnings: tuple[str, ...]  # on the data, a line each

    def datasets(self) -> list[ExampleDataset]:
        """Training data and, if any, held-out data."""
        return [self.train] if self.held_out is None else [self.train, self.held_out]

    def fingerprints(self) -> dict[str, str]:
        """Fingerprints of the data, by config key."""
        keys = ("data.train", "data.eval")
        return {key: data.fingerprint for key, data in zip(keys, self.datasets(), strict=False)}


def open_data(job: Job, world: World) -> PreferenceData:
    """Tokenize (or find in the cache) on rank 0, then open on every rank. Collective.

    If other nodes have caches or packed files of their own, one rank of each verifies that they are
    whole and equal to rank 0's.

    Raises:
        ValueError: one line, for bad data, tokens that a role's model does not have, or nodes whose
            data differ.
    """
    config, tokenizer = job.config, open_tokenizer(job.tokenizer)
    models = vocabularies(job.models.values())
    warnings = check_vocabulary(tokenizer, models)

    def read() -> tuple[str, tuple[str, ...], dict[str, str], dict[str, str]]:
        progress, hashes = config.telemetry.progress, hash_sources(config.data)
        data = job_pairs(config, tokenizer, progress=progress, hash_of=hashes.__getitem__)
        check_tokens(data.datasets(), tokenizer, models)
        return data.summary, data.warnings, hashes, data.fingerprints()

    summary, check_warnings, hashes, fingerprints = from_rank_zero(read)
    if world.rank == 0:
        _logger.info("%s", summary)
        for line in (*warnings, *check_warnings):
            _logger.warning("%s", line)

    def again(verify: bool) -> PreferenceData:
        return job_pairs(config, tokenizer, verify=verify, hash_of=hashes.__getitem__)

    on_other_nodes(lambda: check_same(again(verify=True).fingerprints(), fingerprints))
    return again(verify=False)


def job_pairs(
    config: JobConfig,
    tokenizer: Tokenizer,
    *,
    progress: bool = False,
    verify: bool = True,
    hash_of: Callable[[str], str] = hash_source,
) -> PreferenceData:
    """Open the job's data; tokenize them if they are not cached. ValueError, one line, if bad.

    ``verify``: read the whole cache or packed files; ``hash_of``: computes or recalls a source's
    hash.
    """
    objective = objective_of(config)
    data = prepare_data(
        config.data,
        config.packing,
        tokenizer,
        add_eos=config.tokenizer.add_eos,
        seed=config.seed,
        cache_dir=cache_folder(config),
        margins=objective.reads_margins,
        unpaired=STAGES[config.stage].data == "unpaired",
        progress=progress,
        verify=verify,
        hash_of=hash_of,
    )
    return PreferenceData(
        data.train,
        data.eval,
        data.rows,
        cache_folder(config),
        _summary(data),
        (*(_cut_responses(data) if objective.reads_ends else ()), *_weights(config, data.train)),
    )


def _summary(data: PreparedData) -> str:
    """Describe the data in one line."""
    line = f"data: {data.report.summary()}"
    if data.eval is None:
        return line
    if data.eval_report is not None:
        return f"{line}; held out: {data.eval_report.summary()}"
    return f"{line}; {len(data.eval)} of them held out"


def _cut_responses(data: PreparedData) -> Iterator[str]:
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
    loss = reference_loss(config)
    if not isinstance(loss, KTOConfig):
        return
    desirable = int(train.labels_of(np.arange(len(train))).sum())
    others = len(train) - desirable
    desirable_total, undesirable_total = (
        loss.desirable_weight * desirable,
        loss.undesirable_weight * others,
    )
    if not desirable_total or not undesirable_total:
        kind = "desirable" if desirable_total else "undesirable"
        yield f"only {kind} responses are learnt from: the policy may move as far as it likes"
    elif desirable != others and not 0.99 <= desirable_total / undesirable_total <= 1.34:
        least, most = undesirable_total / desirable, 4 / 3 * undesirable_total / desirable
        yield (
            f"{desirable} responses are desirable and {others} are not, and their weights do not "
            "make up for it: KTO's paper would have kto.desirable_weight from "
            f"{least:.2f} to {most:.2f}, or kto.undesirable_weight from "
            f"{0.75 * desirable_total / others:.2f} to {desirable_total / others:.2f}"
        )


def train_loader(config: JobConfig, data: PreferenceData, view: DataView) -> ExampleLoader:
    """Load the training examples in global batches."""
    return ExampleLoader(
        data.train,
        **_row_settings(config),
        **view,
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

    Pairs are in the order of the data. Single responses are shuffled: in the data, responses to the
    same prompt are often neighbours, and KTO's mismatched rows need neighbours with other prompts.
    """
    mixed = STAGES[config.stage].data == "unpaired"
    return ExampleLoader(dataset, **_row_settings(config), **view, scope="batch", shuffle=mixed)


def _row_settings(config: JobConfig) -> dict[str, Any]:
    return {
        "global_batch_size": config.global_batch_size,
        "row_tokens": config.packing.row_tokens,
        "layout": config.packing.row_layout,
        "packed": config.packing.is_packed,
        "seed": config.seed,
    }
