"""Load global batches of microbatches: a pure function of (dataset, settings, step).

Rows hold examples in the shared or paired layout, packed back to back or in padded slots.

Invariants (the tests assert them):
- every example is in exactly one step of every epoch;
- a step holds the same examples under the same ids for all ``data_size`` and ``data_rank``, and
  every data rank gets the same number of microbatches, a multiple of ``microbatch_multiple``;
- ``batch(step)`` depends on the loader's arguments alone: a resumed run just asks for later steps.
"""

from copy import copy
from dataclasses import dataclass, replace
from math import ceil, lcm

import numpy as np

from puzzle_align.data.dataset import ExampleDataset
from puzzle_align.data.packing import (
    Rows,
    balance,
    equal_rows,
    example_lengths,
    first_fit_decreasing,
    row_costs,
    row_pairs,
    shortest_rows,
    slot_lengths,
)
from puzzle_align.layout.plan import ParallelPlan
from puzzle_align.layout.rows import (
    SLOT_MULTIPLE,
    Microbatch,
    RowLayout,
    Segment,
    position_ids,
    predictions,
)

NUM_WIDTHS = 4  # widths of padded examples in a run: compiled attention compiles each of them


@dataclass(frozen=True)
class DataView:
    """The part of every global batch that one data-parallel rank of a plan gets."""

    data_rank: int = 0
    data_size: int = 1
    microbatch_multiple: int = 1  # divides the number of microbatches
    sequence_multiple: int = 1  # divides a row's tokens: the sequence-parallel tensor ranks


def plan_view(plan: ParallelPlan, data_rank: int = 0) -> DataView:
    """The view of data-parallel rank ``data_rank`` of a plan."""
    return DataView(data_rank, plan.data, plan.microbatch_multiple, plan.sequence_shards)


@dataclass(frozen=True)
class Batch:
    """One optimizer step's data, as one data-parallel rank sees it."""

    microbatches: list[Microbatch]  # of this rank; equally many on all
    num_examples: int  # of all ranks
    example_indices: np.ndarray  # int64 [num_examples], in the data set; example ids index it
    num_tokens: int  # of prompts and responses, on all ranks
    num_row_tokens: int  # including padding, on all ranks


@dataclass(frozen=True)
class RowContents:
    """Mean content of a step's rows, before they are split over data ranks."""

    num_rows: int
    num_tokens: int  # of each row
    pairs: float  # unmasked (query, key) pairs of prompts and responses
    padding_pairs: float  # the same of padding
    predictions: float  # response tokens


@dataclass(frozen=True)
class _StepRows:
    """A step's rows, before they are split over ranks."""

    members: np.ndarray  # the step's examples: indices in the data set, int64 [B]
    rows: Rows  # of indices in members
    num_tokens: int  # of each row
    slot_width: int | None  # padded: tokens between segment starts


class ExampleLoader:
    """Deterministic batches of a dataset for one data-parallel rank.

    - ``scope='batch'`` packs each global batch separately (an epoch's last one may be smaller), in
      the shortest rows that give each rank no more of them than rows of ``row_tokens`` would.
    - ``scope='dataset'`` packs the whole dataset once, or uses the given ``rows``; a step is then a
      fixed number of rows with about ``global_batch_size`` examples.
    - Without ``packed``, every sequence gets a slot as long as the batch's longest, and the scope
      is 'batch'.

    Shuffling keeps each ``examples_together`` neighbours together: it divides the number of
    examples and ``global_batch_size``. ValueError if a row cannot hold the longest example.
    """

    def __init__(
        self,
        dataset: ExampleDataset,
        *,
        global_batch_size: int,
        row_tokens: int,
        layout: str,
        packed: bool,
        scope: str,
        seed: int,
        shuffle: bool,
        view: DataView,
        rows: Rows | None = None,
        examples_together: int = 1,
    ) -> None:
        self.dataset = dataset
        self.global_batch_size = global_batch_size
        self.row_tokens = row_tokens
        self.layout = layout
        self.packed = packed
        self.seed = seed
        self.shuffle = shuffle
        self.view = view
        self._together = examples_together
        self._order: tuple[int, np.ndarray] | None = None  # (epoch, its order), cached
        self._longest: int | None = None  # bound of a sequence's tokens; None: the data's longest
        self.longest_example = self._check()  # row tokens that it needs
        if rows is None and packed and scope == "dataset":
            rows = first_fit_decreasing(self._example_lengths(slice(None)), row_tokens)
        self._rows = rows  # each a list of examples; None: every batch is packed anew
        num_items = len(dataset) if rows is None else len(rows)
        self._items_per_step = global_batch_size
        if rows is not None:
            self._items_per_step = max(1, round(global_batch_size * num_items / len(dataset)))
        self._num_items = num_items

    @property
    def has_ready_rows(self) -> bool:
        """Whether rows are packed over all data, not for each batch."""
        return self._rows is not None

    @property
    def steps_per_epoch(self) -> int:
        """Steps of an epoch."""
        return ceil(self._num_items / self._items_per_step)

    def batch(self, step: int) -> Batch:
        """This rank's data of global step ``step`` >= 0, counted over all epochs."""
        plan, ranks = self._split(step)
        none = np.zeros(0, dtype=np.int64)
        microbatches = [
            collate_row(
                self.dataset,
                plan.members,
                none if row is None else plan.rows[row],
                layout=self.layout,
                num_tokens=plan.num_tokens,
                slot_width=plan.slot_width,
            )
            for row in ranks[self.view.data_rank]
        ]
        return Batch(
            microbatches=microbatches,
            num_examples=len(plan.members),
            example_indices=plan.members,
            num_tokens=int(self._example_lengths(plan.members).sum()),
            num_row_tokens=plan.num_tokens * self.view.data_size * len(microbatches),
        )

    def num_microbatches(self, step: int) -> int:
        """Number of microbatches of a step on each data rank."""
        return len(self._split(step)[1][0])

    def seen_before(self, step: int) -> np.ndarray:
        """How often each example occurs in the steps before ``step``, int64 [n]."""
        epoch, position = divmod(step, self.steps_per_epoch)
        items = self._epoch_order(epoch)[: position * self._items_per_step]
        members = items if self._rows is None else self._rows.take(items).examples
        return epoch + np.bincount(members, minlength=len(self.dataset))

    def data_ranks(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Examples of a step, and the data rank of each, both int64 [B]. Reads no tokens."""
        plan, ranks = self._split(step)
        owners = np.zeros(len(plan.members), dtype=np.int64)
        for data_rank, rows in enumerate(ranks):
            for row in rows:
                if row is not None:
                    owners[plan.rows[row]] = data_rank
        return plan.members, owners

    def row_contents(self, step: int) -> RowContents:
        """Mean content of a step's rows. Reads no tokens."""
        plan, _ = self._split(step)
        number, (prompts, responses) = len(plan.rows), self._lengths(plan.members)
        lengths = self._example_lengths(plan.members)[plan.rows.examples]
        used = np.add.reduceat(lengths, plan.rows.offsets[:-1]).astype(np.float64)
        # Packed rows have a single gap. The gaps of padded slots count as equally long.
        gaps = 1 if plan.slot_width is None else plan.num_tokens // plan.slot_width
        unused = plan.num_tokens - used
        # A triangle of n tokens has (n^2 + n) / 2 pairs; the squares alone lack n / 2.
        pairs = row_pairs(plan.rows, prompts, responses, self.layout) + used / 2
        return RowContents(
            num_rows=number,
            num_tokens=plan.num_tokens,
            pairs=float(pairs.mean()),
            padding_pairs=float((unused**2 / gaps + unused).mean() / 2),
            predictions=float(responses.sum()) / number,
        )

    def seen_by(self, view: DataView) -> "ExampleLoader":
        """The same steps for another data rank or plan."""
        if view == self.view:
            return self
        loader = copy(self)
        loader.view = view
        loader.longest_example = loader._check()
        return loader

    def mismatched(self, step: int, longest: int) -> "ExampleLoader":
        """A loader whose step 0 has the mismatched examples of ``step``, packed anew.

        Each prompt gets the preceding example's response (``ExampleDataset.mismatched``), the first
        the last's. Rows of the whole data are sorted by length, which brings responses to one
        prompt together: of these the order is drawn.
        """
        data, members = self.dataset, self._split(step)[0].members
        order = np.arange(len(members))
        if self._rows is not None:
            np.random.default_rng((self.seed, step)).shuffle(order)
        partners = np.empty_like(members)
        partners[order] = members[np.roll(order, 1)]
        loader = self.over(data.mismatched(members, partners, longest))
        loader.shuffle, loader._rows, loader._order = False, None, None
        loader.global_batch_size = loader._items_per_step = loader._num_items = len(loader.dataset)
        # The same in all steps, so that padded rows have few shapes.
        loader._longest = min(longest, int(data.prompt_lengths.max() + data.response_lengths.max()))
        return loader

    def over(self, dataset: ExampleDataset) -> "ExampleLoader":
        """The same steps over another data set with equal lengths."""
        loader = copy(self)
        loader.dataset = dataset
        return loader

    def _split(self, step: int) -> tuple[_StepRows, list[list[int | None]]]:
        """Rows of a step, and the row numbers of each data rank; None is an empty row."""
        epoch, position = divmod(step, self.steps_per_epoch)
        start = position * self._items_per_step
        items = self._epoch_order(epoch)[start : start + self._items_per_step]
        if self._rows is None:
            plan = self._plan_batch(items)
        else:
            taken = self._rows.take(items)
            rows = Rows(np.arange(len(taken.examples)), taken.offsets)
            plan = _StepRows(taken.examples, rows, self.row_tokens, None)
        costs = row_costs(plan.rows, *self._lengths(plan.members), self.layout)
        return plan, balance(costs, self.view.data_size, self.view.microbatch_multiple)

    def _check(self) -> int:
        """Row tokens of the longest example; ValueError if a row cannot hold it."""
        if len(self.dataset) == 0:
            raise ValueError("data.train: the data set is empty; give another")
        if self.row_tokens % self.view.sequence_multiple:
            raise ValueError(
                f"packing.row_tokens={self.row_tokens} is not a multiple of "
                f"{self.view.sequence_multiple}, the tensor ranks that share a row; choose "
                "one that is"
            )
        every = slice(None)
        needed = self._example_lengths(every) if self.packed else self._slot_lengths(every)
        most = int(needed.max())
        if most > self.row_tokens:
            raise ValueError(
                f"packing.row_tokens={self.row_tokens} cannot hold example {int(needed.argmax())}, "
                f"which needs {most} tokens; raise it or lower data.max_length"
            )
        return most

    def _epoch_order(self, epoch: int) -> np.ndarray:
        """Examples (or rows) in the order of ``epoch``, int64."""
        if not self.shuffle:
            return np.arange(self._num_items)
        order = self._order  # read once: another thread may replace it
        if order is None or order[0] != epoch:
            generator = np.random.default_rng([self.seed, epoch])
            first = generator.permutation(self._num_items // self._together) * self._together
            order = self._order = (epoch, (first[:, None] + np.arange(self._together)).ravel())
        return order[1]

    def _plan_batch(self, items: np.ndarray) -> _StepRows:
        """A step of examples, packed or padded into rows."""
        if self.packed:
            rows, num_tokens = shortest_rows(
                self._example_lengths(items),
                self.row_tokens,
                num_rows_multiple=self._num_rows_multiple,
                num_parts=self.view.sequence_multiple,
            )
            return _StepRows(items, rows, num_tokens, None)
        # Spread examples over all rows that the ranks need anyway, to keep rows short.
        example_width = self._bucket(int(self._slot_lengths(items).max()))
        width = example_width // self._slots_per_example
        fewest = ceil(len(items) / (self.row_tokens // example_width))
        num_rows = ceil(fewest / self._num_rows_multiple) * self._num_rows_multiple
        examples_per_row = ceil(len(items) / num_rows)
        rows = equal_rows(len(items), examples_per_row)
        return _StepRows(items, rows, examples_per_row * example_width, width)

    def _bucket(self, example_width: int) -> int:
        """Round a padded example's width up to one of about ``NUM_WIDTHS`` widths."""
        unit = self._slots_per_example * lcm(SLOT_MULTIPLE, self.view.sequence_multiple)
        if self._longest is None:
            longest = self.longest_example
        else:
            longest = ceil(self._longest / unit) * unit
        step = ceil(longest / NUM_WIDTHS / unit) * unit
        return min(ceil(example_width / step) * step, longest)

    @property
    def _num_rows_multiple(self) -> int:
        """Divides the number of rows that ranks get together, empty ones too."""
        return self.view.data_size * self.view.microbatch_multiple

    @property
    def _slots_per_example(self) -> int:
        return 1 if self.layout == "shared" else self.dataset.num_responses

    def _lengths(self, indices: slice | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Tokens of prompts, int32 [n], and of responses, int32 [n, K]."""
        return self.dataset.prompt_lengths[indices], self.dataset.response_lengths[indices]

    def _example_lengths(self, indices: slice | np.ndarray) -> np.ndarray:
        """Tokens of each example in a packed row, int64."""
        return example_lengths(*self._lengths(indices), self.layout)

    def _slot_lengths(self, indices: slice | np.ndarray) -> np.ndarray:
        """Tokens of each example's slots if it were alone in a padded row, int64."""
        multiple = lcm(SLOT_MULTIPLE, self.view.sequence_multiple)
        slots = slot_lengths(*self._lengths(indices), self.layout, multiple)
        return slots * self._slots_per_example


def collate_row(
    dataset: ExampleDataset,
    members: np.ndarray,
    example_ids: np.ndarray,
    *,
    layout: str,
    num_tokens: int,
    slot_width: int | None = None,
) -> Microbatch:
    """Collate the examples ``members[example_ids]`` into a microbatch of ``num_tokens`` tokens.

    An example is one segment with all branches (shared), or a segment per branch (paired).

    Args:
        members: the global batch's indices in the data set, int64 [B].
        example_ids: the row's examples, indices in ``members``, int64.
        slot_width: tokens between segment starts; None: segments lie back to back.
    """
    contents = [
        (i, int(members[i]), group)
        for i in example_ids.tolist()
        for group in _segment_branches(dataset, int(members[i]), layout)
    ]
    segments: list[Segment] = []
    tokens = np.full(num_tokens, dataset.pad_id, dtype=np.int64)
    start = 0
    for _, index, group in contents:
        parts = [dataset.prompt(index), *(dataset.response(index, b) for b in group)]
        lengths = [len(part) for part in parts]
        segments.append(Segment(start, lengths[0], tuple(lengths[1:])))
        end = start + sum(lengths)
        tokens[start:end] = np.concatenate(parts)
        start = end if slot_width is None else start + slot_width
    row_layout = RowLayout(num_tokens, tuple(segments))
    assert not segments or segments[-1].end <= num_tokens
    sources, targets, slots = predictions(row_layout)
    slot_examples = np.array([i for i, _, group in contents for _ in group], dtype=np.int64)
    return Microbatch(
        layout=row_layout,
        tokens=tokens,
        position_ids=position_ids(row_layout),
        predict_from=sources,
        targets=tokens[targets],
        slots=slots,
        example_ids=slot_examples,
        branch_ids=np.array([b for _, _, group in contents for b in group], dtype=np.int64),
        labels=dataset.labels_of(members[slot_examples]),
        num_branches=dataset.num_responses,
        comparisons=None if dataset.levels is None else _of_row(dataset, members, example_ids),
    )


def _of_row(dataset: ExampleDataset, members: np.ndarray, example_ids: np.ndarray) -> np.ndarray:
    """``Microbatch.comparisons``."""
    every = dataset.comparisons(members)
    numbers = np.flatnonzero(np.isin(every[:, 0], example_ids))
    return np.concatenate([numbers[:, None], every[numbers]], axis=1)


def _segment_branches(dataset: ExampleDataset, index: int, layout: str) -> list[tuple[int, ...]]:
    """The responses in each segment of an example."""
    branches = np.flatnonzero(dataset.response_lengths[index]).tolist()
    return [tuple(branches)] if layout == "shared" else [(branch,) for branch in branches]


@dataclass(frozen=True)
class MismatchedLoader:
    """A loader's steps with mismatched prompts and responses, for KTO's reference point.

    See ``ExampleDataset.mismatched``; a row must hold ``longest`` tokens.
    """

    loader: ExampleLoader
    longest: int
    view: DataView = DataView()

    def batch(self, step: int) -> Batch:
        """The mismatched examples of a step, packed anew."""
        return self.loader.mismatched(step, self.longest).seen_by(self.view).batch(0)

    def seen_by(self, view: DataView) -> "MismatchedLoader":
        """The same steps for another data rank or plan."""
        return replace(self, view=view)
