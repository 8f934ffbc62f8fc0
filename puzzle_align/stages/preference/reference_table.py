"""Tables of the reference's log-probabilities, computed once (``precompute_ref_log_probs``)."""

import hashlib
import logging
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from puzzle_align.config.resolve import Job
from puzzle_align.data.build import Display, show_nothing
from puzzle_align.data.cache import ColumnWriter, cached, find_columns
from puzzle_align.data.dataset import ExampleDataset
from puzzle_align.data.prepare import Prepared
from puzzle_align.layout.job_plan import ContextPlan
from puzzle_align.runtime.batches import DataBatches, data_view
from puzzle_align.runtime.context import Context, freeze
from puzzle_align.runtime.groups.collectives import from_rank_zero, on_other_nodes, wait_for_all
from puzzle_align.runtime.groups.world import World
from puzzle_align.runtime.phases import PhaseRunner
from puzzle_align.runtime.row_input import Reading
from puzzle_align.stages.inputs import cache_folder
from puzzle_align.stages.models import open_context
from puzzle_align.stages.preference.data import eval_loader
from puzzle_align.stages.weights import Weights, role_weights
from puzzle_align.telemetry.progress import show_preparation

_VERSION = 1  # of the files
_COLUMN = "log_probs"
_logger = logging.getLogger(__name__)


def open_tables(
    job: Job, world: World, data: Prepared[ExampleDataset], reading: Reading
) -> tuple[dict[str, np.ndarray], float]:
    """Open tables [n, K] of all data sets, by fingerprint. Collective.

    For tables that are not on disk the reference is built, run over the data, and released.

    Returns:
        The tables, and seconds of the reference's passes; 0 if all tables were on disk.
    """
    (planned,) = job.plan.phase("precompute").contexts
    folder = cache_folder(job.config) / "ref_log_probs"
    context: Context | None = None
    tables, seconds = {}, 0.0
    shown = world.rank == 0 and job.config.telemetry.progress
    display = show_preparation if shown else show_nothing
    weights = role_weights(job.models[planned.role], job.config)
    fingerprint = from_rank_zero(lambda: model_fingerprint(planned, weights))
    for dataset in data.datasets().values():
        key = [_VERSION, fingerprint, dataset.fingerprint, reading.tail_weight]
        is_there = partial(_is_there, folder, key)
        if not (from_rank_zero(is_there) and all(on_other_nodes(is_there))):
            if context is None:
                if world.rank == 0:
                    _logger.info("the reference runs over all data before training, once")
                context = open_context(weights, planned, world)
                wait_for_all(world.device)  # ranks differ in how much they read
                freeze(context)
            started = time.monotonic()
            table = _table(job, context, dataset, reading, display)
            seconds += time.monotonic() - started
            write = partial(_write, folder, key, table)
            from_rank_zero(write)
            on_other_nodes(write)
        kept = find_columns(folder, key, verify=False)  # verified, or written, on this node
        if kept is None:
            raise ValueError(
                f"data.cache_dir: the reference's table in {folder} was deleted while it was read: "
                "run the same command again"
            )
        tables[dataset.fingerprint] = kept.arrays[_COLUMN]  # memory-mapped float64 [n, K]
    return tables, seconds


def model_fingerprint(planned: ContextPlan, weights: Weights) -> str:
    """Hash a role's model: dimensions, precision and every weight (reads all files)."""
    options = planned.options
    computed = (planned.model, options.dtype)
    if options.fp8 is not None:
        computed += (options.fp8, options.fp8_recipe)
    digest = hashlib.sha256(repr(computed).encode())
    digest.update(weights.fingerprint())
    return digest.hexdigest()


def _is_there(folder: Path, key: list[Any]) -> bool:
    """Whether a whole table exists; a damaged one is removed, and logged."""
    return find_columns(folder, key, verify=True) is not None


def _write(folder: Path, key: list[Any], table: np.ndarray) -> None:
    """Write float64 [n, K]; ValueError, one line, if a value is not finite or writing fails."""
    if not np.isfinite(table).all():
        raise ValueError(
            "the reference gives log-probabilities that are not finite: its weights, or the "
            "precision it is run in, are not good for this data; check reference.model"
        )

    def make(writer: ColumnWriter) -> dict[str, Any]:
        writer.append({_COLUMN: table})
        return {}

    cached(folder, key, make, verify=True)


def _table(
    job: Job, context: Context, dataset: ExampleDataset, reading: Reading, display: Display
) -> np.ndarray:
    """Run the reference over a data set; float64 [n, K]. Collective over its ranks."""
    phase = job.plan.phase("precompute")
    (planned,) = phase.contexts
    key = (planned.role, planned.workload)
    runner = PhaseRunner({key: context}, {}, context.device, reading=lambda _: reading)
    loader = eval_loader(job.config, dataset, data_view(context))
    batches = DataBatches(loader, planned.options.attention, context.device)
    table = np.zeros((len(dataset), dataset.num_responses))
    title = f"log-probabilities of the {planned.role}, before training"
    started, done = time.monotonic(), 0
    with display(title, len(dataset)) as show:
        for step in range(len(batches)):
            examples = batches.batch(step).example_indices
            outputs = runner.infer(phase, batches, step)[planned.role]
            column = outputs.by_response(len(examples), dataset.num_responses)
            if step + 1 < len(batches):
                batches.prepare(step + 1)
            table[examples] = context.sum_over_ranks(column).cpu().numpy()
            done += len(examples)
            show(done, f"{done / (time.monotonic() - started):.0f} examples/s")
    return table
