"""The steps of a loader, with their rows on this rank's device."""

import numpy as np
import torch

from puzzle_align.data.dataset import ExampleDataset
from puzzle_align.data.loader import Batch, ExampleLoader
from puzzle_align.data.packing import example_lengths
from puzzle_align.layout.model import AttentionBackend, Head
from puzzle_align.layout.plan import ParallelPlan
from puzzle_align.runtime.ahead import Ahead
from puzzle_align.runtime.context import Context
from puzzle_align.runtime.row_input import PLAIN_TOKENS, RowInput, TokenOptions, to_device
from puzzle_align.stages.data_view import data_view, plan_view


class StepRows:
    """A loader's batches and their rows, each prepared once for all models that see them alike.

    Every rank prepares the same steps, of as many rows: both follow from the loader and the step.
    """

    def __init__(
        self,
        loader: ExampleLoader,
        attention: AttentionBackend,
        device: torch.device,
        head: Head = "lm",
        tokens: TokenOptions = PLAIN_TOKENS,
    ) -> None:
        self._loader = loader
        self._attention: AttentionBackend = attention
        self._device = device
        self._head: Head = head
        self._tokens = tokens
        self._prepared = Ahead(self._prepare, device)
        self._views: dict[tuple[object, ...], StepRows] = {}  # by what a model's plan decides
        self._seen: tuple[int, int] | None = None  # a step, and the tokens up to its end

    def __len__(self) -> int:
        """Steps in which every pair is seen once."""
        return self._loader.steps_per_epoch

    @property
    def dataset(self) -> ExampleDataset:
        """What the steps are made of."""
        return self._loader.dataset

    def prepare(self, step: int) -> None:
        """Have a step's rows made, for all models that have asked for theirs; do not wait."""
        for steps in (self, *self._views.values()):
            steps._prepared.prepare(step)

    def batch(self, step: int) -> Batch:
        """A step's batch, counted over epochs."""
        return self._prepared.of(step)[0]

    def rows(self, step: int) -> list[RowInput]:
        """This rank's rows of a step, the same objects each time while the step is kept."""
        return self._prepared.of(step)[1]

    def tokens_seen(self, step: int) -> int:
        """Tokens of all responses, each with its prompt, from the first step to this one's end.

        It follows from the step alone, so that a resumed run goes on with the same count.
        """
        if self._seen is not None and self._seen[0] == step - 1:
            before = self._seen[1]
        else:
            before = int(self._loader.seen_before(step) @ self._sequence_lengths(slice(None)))
        own = self._sequence_lengths(self.batch(step).example_indices).sum()
        self._seen = step, before + int(own)
        return self._seen[1]

    def _sequence_lengths(self, examples: np.ndarray | slice) -> np.ndarray:
        """Tokens of every example's responses, each with its prompt, int64 [n]."""
        data = self.dataset
        return example_lengths(
            data.prompt_lengths[examples], data.response_lengths[examples], "paired"
        )

    @property
    def loader(self) -> ExampleLoader:
        """That which the steps are of."""
        return self._loader

    def own_examples(self, step: int) -> list[int]:
        """The examples of a step's batch (0 .. num_examples - 1) in this rank's rows."""
        ids = [microbatch.example_ids for microbatch in self.batch(step).microbatches]
        return np.unique(np.concatenate(ids)).tolist()

    def data_ranks(self, step: int, plan: ParallelPlan) -> np.ndarray:
        """The data rank of ``plan`` that has each of a step's examples, int64 [num_examples]."""
        return self._loader.seen_by(**plan_view(plan, data_rank=0)).data_ranks(step)[1]

    def seen_by(self, context: Context) -> "StepRows":
        """The same steps as another model's plan splits them; itself where that is no other."""
        view = data_view(context)
        key = tuple(view.values())
        if key not in self._views:
            loader = self._loader.seen_by(**view)
            settings = self._attention, self._device, self._head, self._tokens
            is_own = loader is self._loader
            self._views[key] = self if is_own else StepRows(loader, *settings)
        return self._views[key]

    def _prepare(self, step: int) -> tuple[Batch, list[RowInput]]:
        batch = self._loader.batch(step)
        settings = self._attention, self._device, self._head, self._tokens
        return batch, [to_device(m, *settings) for m in batch.microbatches]
