"""Batches of a loader, with this rank's rows on its device in each model's input form.

Invariants (the tests assert them):
- a step's rows are the same whether they were prepared ahead or not, and the same objects each time
  while the step is kept;
- every rank prepares the same steps, with equally many rows: both depend on loader and step alone.
"""

from typing import TYPE_CHECKING

import numpy as np
import torch

from puzzle_align.data.dataset import ExampleDataset
from puzzle_align.data.loader import Batch, DataView, ExampleLoader, MismatchedLoader, plan_view
from puzzle_align.data.packing import example_lengths
from puzzle_align.layout.model import AttentionBackend
from puzzle_align.runtime.ahead import Ahead
from puzzle_align.runtime.row_input import PLAIN, Reading, RowInput, to_device

if TYPE_CHECKING:
    from puzzle_align.runtime.context import Context


def data_view(context: "Context") -> DataView:
    """This rank's view of a global batch under the context's plan."""
    return plan_view(context.plan, context.data_rank)


_Rows = dict[Reading, list[RowInput]]  # a step's rows on this rank; all share tokens and masks


class Batches:
    """Batches of a loader and their rows, each prepared once for all models with the same view."""

    def __init__(
        self,
        loader: ExampleLoader | MismatchedLoader,
        attention: AttentionBackend,
        device: torch.device,
    ) -> None:
        self._loader = loader
        self._attention = attention
        self._device = device
        self._readings: list[Reading] = []  # requested by models so far
        self._prepared = Ahead(self._prepare, device)
        self._views: dict[DataView, Batches] = {}
        self._is_read = False  # itself, not only as models see it

    def prepare(self, step: int) -> None:
        """Start making a step's rows, for all readings requested so far, without waiting."""
        for batches in {*self._views.values(), *([self] if self._is_read else [])}:
            batches._prepared.prepare(step)

    def batch(self, step: int) -> Batch:
        """Return a step's batch; steps are counted over epochs."""
        self._is_read = True
        return self._prepared.of(step)[0]

    def rows(self, step: int, reading: Reading = PLAIN) -> list[RowInput]:
        """Return this rank's rows of a step, the same objects each time while the step is kept."""
        self._is_read = True
        if reading not in self._readings:
            self._readings.append(reading)
        batch, rows = self._prepared.of(step)
        if reading not in rows:
            rows[reading] = self._read(batch, reading, rows)
        return rows[reading]

    def seen_by(self, context: "Context") -> "Batches":
        """Return the batches split by a model's plan; itself if the split is the same."""
        view = data_view(context)
        if view not in self._views:
            loader = self._loader.seen_by(view)
            is_same = loader is self._loader
            self._views[view] = self if is_same else Batches(loader, self._attention, self._device)
        return self._views[view]

    def _prepare(self, step: int) -> tuple[Batch, _Rows]:
        batch = self._loader.batch(step)
        rows: _Rows = {}
        for reading in tuple(self._readings):
            rows[reading] = self._read(batch, reading, rows)
        return batch, rows

    def _read(self, batch: Batch, reading: Reading, others: _Rows) -> list[RowInput]:
        like = next(iter(others.values()), [None] * len(batch.microbatches))
        return [
            to_device(microbatch, self._attention, self._device, reading, row)
            for microbatch, row in zip(batch.microbatches, like, strict=True)
        ]


class DataBatches(Batches):
    """Batches of a data set's loader; ``len`` is the number of steps in an epoch."""

    def __init__(
        self, loader: ExampleLoader, attention: AttentionBackend, device: torch.device
    ) -> None:
        super().__init__(loader, attention, device)
        self.loader = loader
        self._seen: tuple[int, int] | None = None  # a step, and the tokens up to its end

    def __len__(self) -> int:
        return self.loader.steps_per_epoch

    @property
    def dataset(self) -> ExampleDataset:
        """Data set of the batches."""
        return self.loader.dataset

    def tokens_seen(self, step: int) -> int:
        """Tokens of all responses, each with its prompt, from the first step to this one's end.

        It depends on the step alone, so that a resumed run continues the same count.
        """
        if self._seen is not None and self._seen[0] == step - 1:
            before = self._seen[1]
        else:
            before = int(self.loader.seen_before(step) @ self._sequence_lengths(slice(None)))
        tokens = self._sequence_lengths(self.batch(step).example_indices).sum()
        self._seen = step, before + int(tokens)
        return self._seen[1]

    def _sequence_lengths(self, examples: np.ndarray | slice) -> np.ndarray:
        """Tokens of every example's responses, each with its prompt, int64 [n]."""
        data = self.dataset
        return example_lengths(
            data.prompt_lengths[examples], data.response_lengths[examples], "paired"
        )
