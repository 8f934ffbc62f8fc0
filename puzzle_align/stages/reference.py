"""The reference's log-probabilities of a batch: from its model, from a table on disk, or zero."""

import hashlib
import os
from pathlib import Path

import numpy as np
import torch

from puzzle_align.data.dataset import PairDataset
from puzzle_align.data.loader import Batch, PairLoader
from puzzle_align.runtime.context import Context
from puzzle_align.runtime.passes import response_log_probs
from puzzle_align.runtime.row_input import RowInput, to_device
from puzzle_align.spec.model import AttentionBackend
from puzzle_align.stages.preference_data import data_view


class NoReference:
    """For losses without a reference, and ``dpo.reference_free``: zeros."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def log_probs(
        self, loader: PairLoader, step: int, batch: Batch, rows: list[RowInput]
    ) -> torch.Tensor:
        """Zeros, float64 [num_pairs, K]."""
        shape = (batch.num_pairs, loader.dataset.num_responses)
        return torch.zeros(shape, dtype=torch.float64, device=self._device)


class LiveReference:
    """A frozen model, run over each batch before the policy."""

    def __init__(self, context: Context, attention: AttentionBackend) -> None:
        self.context = context
        self._attention: AttentionBackend = attention
        self._views: dict[PairLoader, PairLoader] = {}  # the policy's loaders, as this model's

    def log_probs(
        self, loader: PairLoader, step: int, batch: Batch, rows: list[RowInput]
    ) -> torch.Tensor:
        """Those of ``loader``'s ``step``, float64 [num_pairs, K], alike on all ranks. Collective.

        ``batch`` and ``rows`` are the policy's view of the step; under a plan that splits the
        data otherwise, the reference sees the same pairs in rows of its own.
        """
        if loader not in self._views:
            self._views[loader] = loader.seen_by(**data_view(self.context))
        own = self._views[loader]
        if own is not loader:
            rows = self.rows(own, step)
        num_branches = loader.dataset.num_responses
        return response_log_probs(self.context, rows, batch.num_pairs, num_branches)

    def rows(self, loader: PairLoader, step: int) -> list[RowInput]:
        """This rank's rows of a step."""
        device = self.context.device
        microbatches = loader.batch(step).microbatches
        return [to_device(microbatch, self._attention, device) for microbatch in microbatches]


class TableReference:
    """Log-probabilities computed once, by data set: ``tables[fingerprint]`` float64 [n, K]."""

    def __init__(self, tables: dict[str, np.ndarray], device: torch.device) -> None:
        self._tables = tables
        self._device = device

    def log_probs(
        self, loader: PairLoader, step: int, batch: Batch, rows: list[RowInput]
    ) -> torch.Tensor:
        """The batch's rows of the table, float64 [num_pairs, K]."""
        found = self._tables[loader.dataset.fingerprint][batch.pair_indices]
        return torch.from_numpy(found).to(self._device)


Reference = NoReference | LiveReference | TableReference


def table_path(folder: Path, model_fingerprint: str, dataset: PairDataset) -> Path:
    """Where the table of (model hash, data hash) lies."""
    key = f"{model_fingerprint} {dataset.fingerprint}"
    return folder / f"ref_log_probs_{hashlib.sha256(key.encode()).hexdigest()[:24]}.npy"


def compute_table(live: LiveReference, loader: PairLoader) -> np.ndarray:
    """One pass of the reference over ``loader``'s data set: float64 [n, K]. Collective."""
    dataset = loader.dataset
    table = np.zeros((len(dataset), dataset.num_responses))
    for step in range(loader.steps_per_epoch):
        batch = loader.batch(step)
        values = live.log_probs(loader, step, batch, live.rows(loader, step))
        table[batch.pair_indices] = values.cpu().numpy()
    return table


def save_table(path: Path, table: np.ndarray) -> None:
    """Write a table whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(f".{os.getpid()}.tmp")
    with open(scratch, "wb") as file:
        np.save(file, table)
    os.replace(scratch, path)
