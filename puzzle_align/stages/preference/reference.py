"""The reference's log-probabilities of a batch: from its model, from a table on disk, or zero."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from puzzle_align.data.cache import ColumnWriter, Kept, cached, found
from puzzle_align.data.dataset import ExampleDataset
from puzzle_align.models.host_copy import copied
from puzzle_align.runtime.context import Context
from puzzle_align.runtime.passes import own_response_outputs
from puzzle_align.stages.preference.step_rows import StepRows
from puzzle_align.stages.tracing import Tracer

_VERSION = 1  # of what is kept
_COLUMN = "log_probs"


class NoReference:
    """For losses without a reference, and ``dpo.reference_free``: zeros."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def log_probs(self, steps: StepRows, step: int) -> torch.Tensor:
        """Zeros for a step's B pairs, float64 [B, K]."""
        shape = (steps.batch(step).num_examples, steps.dataset.num_responses)
        return torch.zeros(shape, dtype=torch.float64, device=self._device)


class LiveReference:
    """A frozen model, run over whole batches."""

    def __init__(self, context: Context, tracer: Tracer) -> None:
        self.context = context
        self.spec = context.spec
        self._tracer = tracer

    def log_probs(self, steps: StepRows, step: int) -> torch.Tensor:
        """Those of a step's B pairs, float64 [B, K], alike on all ranks. Collective over them.

        ``steps`` are as the policy sees them; under a plan that splits the data otherwise, the
        reference sees the same pairs in rows of its own.
        """
        return self.context.sum_over_ranks(self.own_log_probs(steps, step))

    def own_log_probs(self, steps: StepRows, step: int) -> torch.Tensor:
        """As ``log_probs``, of this rank's rows where it is their output rank; else zeros."""
        own = steps.seen_by(self.context)
        return own_response_outputs(
            self.context,
            own.rows(step),
            own.batch(step).num_examples,
            own.dataset.num_responses,
            self._tracer.spans(self.context.role),
        )


class TableReference:
    """Log-probabilities computed once, by data set: ``tables[fingerprint]`` float64 [n, K]."""

    def __init__(self, tables: dict[str, np.ndarray], device: torch.device) -> None:
        self._tables = tables
        self._device = device

    def log_probs(self, steps: StepRows, step: int) -> torch.Tensor:
        """Those of a step's B pairs, float64 [B, K]."""
        found = self._tables[steps.dataset.fingerprint][steps.batch(step).example_indices]
        return copied(found, self._device)


Reference = NoReference | LiveReference | TableReference


@dataclass(frozen=True)
class KeptTable:
    """Where a reference's log-probabilities of a data set lie on disk: see ``data.cache``."""

    folder: Path
    model_fingerprint: str
    dataset: ExampleDataset
    ld_alpha: float | None  # the weight of LD-DPO

    def is_there(self) -> bool:
        """Whether it is there as it was made; a damaged one is taken away, and that is logged."""
        return found(self._folder, self._key, self._problem, verify=True) is not None

    def write(self, table: np.ndarray) -> None:
        """Keep float64 [n, K]; ValueError, one line, if not all is finite, or it cannot be."""
        if not np.isfinite(table).all():
            raise ValueError(
                "the reference gives log-probabilities that are not finite: its weights, or the "
                "precision it is run in, are not good for this data; check reference.model"
            )

        def make(writer: ColumnWriter) -> dict[str, Any]:
            writer.append({_COLUMN: table})
            return {}

        cached(self._folder, self._key, make, self._problem, verify=True)

    def opened(self) -> np.ndarray:
        """Float64 [n, K], memory-mapped; it has been verified, or written, on this node."""
        kept = found(self._folder, self._key, self._problem, verify=False)
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

    def _problem(self, kept: Kept) -> str | None:
        shape = (len(self.dataset), self.dataset.num_responses)
        table = kept.arrays.get(_COLUMN)
        if table is None or table.dtype != np.float64 or table.shape != shape:
            return f"it has no float64 {shape}"
        return None if np.isfinite(table).all() else "it has a number that is not finite"


def compute_table(live: LiveReference, steps: StepRows) -> np.ndarray:
    """One pass of the reference over the steps' data set: float64 [n, K]. Collective."""
    table = np.zeros((len(steps.dataset), steps.dataset.num_responses))
    for step in range(len(steps)):
        made = live.log_probs(steps, step)
        if step + 1 < len(steps):
            steps.prepare(step + 1)
        table[steps.batch(step).example_indices] = made.cpu().numpy()
    return table
