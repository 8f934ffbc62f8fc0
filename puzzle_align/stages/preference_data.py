"""The data of a preference stage: tokenizer, train and held-out pairs, loaders for every model."""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

from puzzle_align.data.dataset import PairDataset
from puzzle_align.data.loader import PairLoader
from puzzle_align.data.packing import Rows
from puzzle_align.data.prepare import PreparedData, prepare_data
from puzzle_align.data.tokenize import Tokenizer, load_tokenizer
from puzzle_align.runtime.context import Context
from puzzle_align.runtime.groups import World
from puzzle_align.runtime.reduce import from_rank_zero
from puzzle_align.spec.job import JobConfig
from puzzle_align.spec.model import ModelSpec
from puzzle_align.spec.plan import ParallelPlan
from puzzle_align.spec.roles import resolve_role_spec, role_model, role_names, trained_role

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PreferenceData:
    """What a preference stage trains and evaluates on."""

    train: PairDataset
    held_out: PairDataset | None
    rows: Rows | None  # ready-made rows of packed files
    cache_folder: Path
    summary: str  # of what was read, for people

    def datasets(self) -> list[PairDataset]:
        """Train and, where there is one, held-out data."""
        return [self.train] if self.held_out is None else [self.train, self.held_out]


def cache_folder(config: JobConfig) -> Path:
    """Where tokenized data and reference tables are kept."""
    return Path(config.data.cache_dir or Path(config.output_dir) / "cache")


def open_tokenizer(config: JobConfig) -> Tokenizer:
    """The job's tokenizer: as configured, else of the trained model's directory, else bytes."""
    model, _ = role_model(config, trained_role(config))
    path = config.tokenizer.path or model.path or "byte"
    return load_tokenizer(path, config.tokenizer.chat_template)


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
    summary = from_rank_zero(lambda: prepare(config, tokenizer, progress=progress).summary)
    if world.rank == 0:
        _logger.info("%s", summary)
    return prepare(config, tokenizer)


def prepare(config: JobConfig, tokenizer: Tokenizer, *, progress: bool = False) -> PreferenceData:
    """The job's pairs, tokenized here or before. ValueError, one line, for bad data."""
    data = prepare_data(
        config.data,
        config.packing,
        tokenizer,
        add_eos=config.tokenizer.add_eos,
        seed=config.seed,
        cache_dir=cache_folder(config),
        margins=config.stage == "reward",
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


def check_vocabulary(tokenizer: Tokenizer, spec: ModelSpec, key: str = "actor.model") -> None:
    """Raise a one-line ValueError if the tokenizer has ids that the model does not know."""
    if tokenizer.vocab_size > spec.vocab_size:
        raise ValueError(
            f"tokenizer.path: the tokenizer has {tokenizer.vocab_size} tokens, the vocab_size of"
            f" {key} is {spec.vocab_size}: give the model's own tokenizer"
        )


class DataView(TypedDict):
    """The arguments of ``PairLoader`` that depend on a model's plan and this rank's place in it."""

    data_rank: int
    data_size: int
    microbatch_multiple: int
    sequence_multiple: int


def data_view(context: Context) -> DataView:
    """What this rank of ``context`` sees of a global batch."""
    return plan_view(context.plan, context.data_rank)


def plan_view(plan: ParallelPlan, data_rank: int) -> DataView:
    """What data-parallel rank ``data_rank`` of a plan sees of a global batch."""
    return {
        "data_rank": data_rank,
        "data_size": plan.data,
        "microbatch_multiple": plan.pipeline if plan.virtual_pipeline > 1 else 1,
        "sequence_multiple": plan.tensor if plan.sequence_parallel else 1,
    }


def train_loader(config: JobConfig, data: PreferenceData, view: DataView) -> PairLoader:
    """The training pairs in global batches."""
    return PairLoader(
        data.train,
        **_row_settings(config),
        **view,
        scope=config.packing.scope,
        shuffle=config.data.shuffle,
        rows=data.rows,
    )


def total_steps(config: JobConfig, loader: PairLoader) -> int:
    """Optimizer steps of the whole job: ``max_steps``, else by epochs."""
    if config.max_steps > 0:
        return config.max_steps
    return config.num_train_epochs * loader.steps_per_epoch


def eval_loader(config: JobConfig, dataset: PairDataset, context: Context) -> PairLoader:
    """Every pair of ``dataset`` once, in its own order, for this rank of ``context``."""
    return PairLoader(
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
