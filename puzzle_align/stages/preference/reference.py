"""The reference's log-probabilities of a batch: from its model, from a table on disk, or zero."""

import hashlib
import os
from pathlib import Path

import numpy as np
import torch

from puzzle_align.data.dataset import ExampleDataset
from puzzle_align.layout.writing import writing
from puzzle_align.models.host_copy import copied
from puzzle_align.runtime.context import Context
from puzzle_align.runtime.passes import own_response_outputs
from puzzle_align.stages.preference.step_rows import StepRows
from puzzle_align.stages.tracing import Tracer


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


def table_path(
    folder: Path, model_fingerprint: str, dataset: ExampleDataset, ld_alpha: float | None
) -> Path:
    """Where the table of (model hash, data hash, weight of LD-DPO) lies."""
    key = f"{model_fingerprint} {dataset.fingerprint}"
    if ld_alpha is not None:
        key += f" ld_alpha={ld_alpha}"
    return folder / f"ref_log_probs_{hashlib.sha256(key.encode()).hexdigest()[:24]}.npy"


def compute_table(live: LiveReference, steps: StepRows) -> np.ndarray:
    """One pass of the reference over the steps' data set: float64 [n, K]. Collective."""
    table = np.zeros((len(steps.dataset), steps.dataset.num_responses))
    for step in range(len(steps)):
        made = live.log_probs(steps, step)
        if step + 1 < len(steps):
            steps.prepare(step + 1)
        table[steps.batch(step).example_indices] = made.cpu().numpy()
    return table


def save_table(path: Path, table: np.ndarray) -> None:
    """Write a table whole or not at all."""
    scratch = path.with_suffix(f".{os.getpid()}.tmp")
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(scratch, "wb") as file:
            np.save(file, table)
        os.replace(scratch, path)
