"""Tables of the reference's log-probabilities, computed once: ``dpo.precompute_ref_log_probs``."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from puzzle_align.config.resolve import Job
from puzzle_align.data.cache import ColumnWriter, cached, find_columns
from puzzle_align.data.dataset import ExampleDataset
from puzzle_align.data.prepare import Prepared
from puzzle_align.runtime.batches import DataBatches, data_view
from puzzle_align.runtime.context import Context, freeze
from puzzle_align.runtime.groups.collectives import from_rank_zero, on_other_nodes, wait_for_all
from puzzle_align.runtime.groups.world import World
from puzzle_align.runtime.phases import PhaseRunner
from puzzle_align.runtime.row_input import Reading
from puzzle_align.stages.inputs import cache_folder
from puzzle_align.stages.models import model_fingerprint, open_context
from puzzle_align.stages.preference.data import eval_loader

_VERSION = 1  # of the files
_COLUMN = "log_probs"


@dataclass(frozen=True)
class KeptTable:
    """Table on disk of a reference's log-probabilities of a data set, stored by ``data.cache``."""

    folder: Path
    model_fingerprint: str
    dataset: ExampleDataset
    ld_alpha: float | None  # weight of LD-DPO

    def is_there(self) -> bool:
        """Whether a whole table exists; a damaged one is removed, and logged."""
        return find_columns(self._folder, self._key, verify=True) is not None

    def write(self, table: np.ndarray) -> None:
        """Write float64 [n, K]; ValueError, one line, if a value is not finite or writing fails."""
        if not np.isfinite(table).all():
            raise ValueError(
                "the reference gives log-probabilities that are not finite: its weights, or the "
                "precision it is run in, are not good for this data; check reference.model"
            )

        def make(writer: ColumnWriter) -> dict[str, Any]:
            writer.append({_COLUMN: table})
            return {}

        cached(self._folder, self._key, make, verify=True)

    def opened(self) -> np.ndarray:
        """Memory-map float64 [n, K]; it was verified, or written, on this node."""
        kept = find_columns(self._folder, self._key, verify=False)
        if kept is None:
            raise ValueError(
                f"data.cache_dir: the table of dpo.precompute_ref_log_probs in {self._folder} has "
                "gone while it was read: run the same command again"
            )
        return kept.arrays[_COLUMN]

    @property
    def _folder(self) -> Path:
        return self.folder / "ref_log_probs"

    @property
    def _key(self) -> list[Any]:
        return [_VERSION, self.model_fingerprint, self.dataset.fingerprint, self.ld_alpha]


def open_tables(
    job: Job, world: World, data: Prepared[ExampleDataset], reading: Reading
) -> dict[str, np.ndarray]:
    """Open tables [n, K] of all data sets, by fingerprint. Collective.

    For tables that are not on disk the reference is built, run over the data, and released.
    """
    (planned,) = job.plan.phase("precompute").contexts
    context: Context | None = None
    tables = {}
    fingerprint = from_rank_zero(lambda: model_fingerprint(job, planned))
    for dataset in data.datasets().values():
        kept = KeptTable(cache_folder(job.config), fingerprint, dataset, reading.tail_weight)
        if not (from_rank_zero(kept.is_there) and all(on_other_nodes(kept.is_there))):
            if context is None:
                context = open_context(job, planned, world)
                wait_for_all(world.device)  # ranks differ in how much they read
                freeze(context)
            write = partial(kept.write, _table(job, context, dataset, reading))
            from_rank_zero(write)
            on_other_nodes(write)
        tables[dataset.fingerprint] = kept.opened()
    return tables


def _table(job: Job, context: Context, dataset: ExampleDataset, reading: Reading) -> np.ndarray:
    """Run the reference over a data set; float64 [n, K]. Collective over its ranks."""
    phase = job.plan.phase("precompute")
    (planned,) = phase.contexts
    key = (planned.role, planned.workload)
    runner = PhaseRunner({key: context}, {}, context.device, reading=lambda _: reading)
    loader = eval_loader(job.config, dataset, data_view(context))
    batches = DataBatches(loader, planned.options.attention, context.device)
    table = np.zeros((len(dataset), dataset.num_responses))
    for step in range(len(batches)):
        examples = batches.batch(step).example_indices
        outputs = runner.infer(phase, batches, step)[planned.role]
        column = outputs.by_response(len(examples), dataset.num_responses)
        if step + 1 < len(batches):
            batches.prepare(step + 1)
        table[examples] = context.sum_over_ranks(column).cpu().numpy()
    return table
