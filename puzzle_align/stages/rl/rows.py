"""The rows of a batch of responses as colocated models take them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from puzzle_align.data.loader import ExampleLoader
from puzzle_align.layout.model import AttentionBackend
from puzzle_align.layout.rows import Microbatch
from puzzle_align.models.host_copy import copied
from puzzle_align.runtime.row_input import ModelInput, OutputKind, model_input, predictions_of


@dataclass(frozen=True)
class BatchRows:
    """This rank's rows of one batch, copied to the device once for all colocated models."""

    microbatches: Sequence[Microbatch]
    prompts: np.ndarray  # int64, the prompts that example ids number
    attention: AttentionBackend
    device: torch.device
    _copied: list[ModelInput] = field(default_factory=list)  # as the first model asked for them

    def __len__(self) -> int:
        return len(self.microbatches)

    def read(
        self, output_kind: OutputKind, *, temperature: float = 1.0, entropies: bool = False
    ) -> list[ModelInput]:
        """The rows as a model reads them: where it predicts, and what."""
        asked = [
            predictions_of(
                m, output_kind, self.device, temperature=temperature, entropies=entropies
            )
            for m in self.microbatches
        ]
        if not self._copied:
            self._copied.extend(
                model_input(m, what, self.attention, self.device)
                for m, what in zip(self.microbatches, asked, strict=True)
            )
        return [row.asked(what) for row, what in zip(self._copied, asked, strict=True)]

    def samples(self, row: int) -> tuple[np.ndarray, np.ndarray]:
        """The samples of a row's response slots, and their lengths: int64 [R] both."""
        microbatch = self.microbatches[row]
        samples = self.prompts[microbatch.example_ids] * microbatch.num_branches
        lengths = np.bincount(microbatch.slots, minlength=len(samples))
        return samples + microbatch.branch_ids, lengths

    def joined(self, columns: Mapping[int, np.ndarray], row: int, num_columns: int) -> torch.Tensor:
        """Samples' columns in the order of a row's N predictions: float64 [N, num_columns]."""
        parts = [columns[int(sample)] for sample in self.samples(row)[0]]
        together = np.concatenate([np.zeros((0, num_columns)), *parts])
        return copied(together, self.device)


def batch_rows(
    loader: ExampleLoader, step: int, attention: AttentionBackend, device: torch.device
) -> BatchRows:
    """A step's rows, for the device."""
    batch = loader.batch(step)
    return BatchRows(batch.microbatches, batch.example_indices, attention, device)
