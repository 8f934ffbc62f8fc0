"""Steps of both layouts and of several backends on the same pairs, in turns.

A step computes whole rows, padding too. So a step has as many pairs as make the ratio of the
layouts' row tokens that of their tokens, within 2% at the full report's sizes, and fill at least
``Setting.rows`` rows.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

import numpy as np
from bench_cases import named_lengths
from dpo_steps import Stack, Step, run_step, summarize

from puzzle_align.data.packing import example_lengths, shortest_rows
from puzzle_align.layout.model import AttentionBackend
from puzzle_align.runtime.batches import DataBatches
from report.process import Results
from report.setting import Setting, open_dataset, pairs_of_a_step, reason_of, rows_of
from report.watch import gpu_query, spread, watched

Compiled = dict[str, set[int]]  # sizes of rows, by backend

LAYOUTS = ("shared", "paired")
_EVEN = 0.0175  # of the ratio: a report asks for 0.97 of the tokens'
_MOST_UNEVEN = 0.02
_MOST_ROWS = 1.4  # times Setting.rows
_TRIED = 40  # numbers of pairs at most; packing them takes a tenth of a second


def compare_all(
    setting: Setting, stack: Stack, data: Sequence[str], names: Sequence[AttentionBackend]
) -> Iterator[tuple[str, Results]]:
    """Compare both layouts on each data set; only the first one needs a warm-up.

    What others compile, for further sizes of rows, they compile before they are timed.
    """
    compiled: Compiled = {}
    for number, name in enumerate(data):
        each = replace(setting, warmup=0) if number else setting
        yield name, compare(each, stack, name, names, compiled=compiled)


def compare(
    setting: Setting,
    stack: Stack,
    data: str,
    names: Sequence[AttentionBackend],
    layouts: Sequence[str] = LAYOUTS,
    *,
    compiled: Compiled | None = None,
) -> Results:
    """Time steps of a data set's lengths, by layout and backend, in turns; leave out what fails.

    Every variant runs one measured step; then the fastest one of each layout runs the others.
    ``compiled`` takes in the sizes of rows for which each backend has been compiled.
    """
    both = len(layouts) > 1
    pairs = pairs_to_compare(setting, data) if both else pairs_of_a_step(setting, data)
    num_steps = setting.warmup + setting.steps
    dataset = open_dataset(setting, data, num_steps, pairs)
    rows = {
        f"{layout}+{name}": rows_of(setting, dataset, layout, pairs, name)
        for layout, name in product(layouts, names)
    }
    turns = _Turns(setting, stack, rows, {} if compiled is None else compiled)
    turns.run(num_steps)
    results: Results = {
        "pairs_per_step": pairs,
        "gpu": turns.gpu or None,
        "variants": {
            name: summarize(steps, stack.spec, 1) for name, steps in turns.measured.items() if steps
        },
        "failed": turns.failed,
    }
    if both:
        sizes = step_sizes(setting, data, pairs)
        results |= {"token_ratio": sizes.token_ratio, "row_ratio": sizes.row_ratio}
        results |= _shared_over_paired(turns.measured, turns.running)
    return results


class _Turns:
    """Steps of variants, in turns."""

    def __init__(
        self, setting: Setting, stack: Stack, rows: Mapping[str, DataBatches], compiled: Compiled
    ) -> None:
        self._setting, self._stack, self._rows, self._compiled = setting, stack, rows, compiled
        self.measured: dict[str, list[Step]] = {name: [] for name in rows}
        self.failed: dict[str, str] = {}
        self.running = list(rows)
        self.gpu = Results()

    def run(self, num_steps: int) -> None:
        """Run the steps, the first ones as a warm-up; after a measured one, the fastest alone."""
        warmup = self._setting.warmup
        with ExitStack() as watching:
            for step in range(num_steps):
                if step == warmup:
                    self._each(partial(self._compile, num_steps))
                    gpu = watched(gpu_query(self._setting.device))
                    self.gpu = watching.enter_context(gpu)
                self._each(partial(self._step, step))
                if step == warmup:
                    self.running = _fastest_by_layout(self.measured, self.running)

    def _each(self, work: Callable[[str], None]) -> None:
        """Do ``work`` for each running variant; one that fails runs no more."""
        for name in [*self.running]:
            try:
                work(name)
            except Exception as error:  # noqa: BLE001 - see reason_of
                self.failed[name] = reason_of(error)
                self.running.remove(name)

    def _step(self, step: int, name: str) -> None:
        done = run_step(self._stack, self._rows[name], step)
        if step >= self._setting.warmup:
            self.measured[name].append(done)

    def _compile(self, num_steps: int, name: str) -> None:
        """Run one row of each size that is new to the variant's backend."""
        sizes, rows = self._compiled.setdefault(name.partition("+")[2], set()), self._rows[name]
        number = rows.dataset.num_responses
        for step in range(num_steps):
            batch = rows.batch(step)
            size = batch.microbatches[0].layout.num_tokens
            if size not in sizes:
                sizes.add(size)
                row = rows.rows(step)[:1]
                table = self._stack.reference_outputs(row, batch.num_examples, number)
                self._stack.train(row, table)


def _fastest_by_layout(measured: dict[str, list[Step]], names: Sequence[str]) -> list[str]:
    """The variant of each layout whose first step was the fastest."""
    fastest: dict[str, str] = {}
    for name in sorted(names, key=lambda name: measured[name][0].seconds):
        fastest.setdefault(name.partition("+")[0], name)
    return list(fastest.values())


def _shared_over_paired(measured: dict[str, list[Step]], names: Sequence[str]) -> Results:
    """Shared over paired pairs a second, of the same pairs step by step; nothing if one failed."""
    by_layout = {name.partition("+")[0]: measured[name] for name in names}
    if by_layout.keys() != set(LAYOUTS):
        return {}
    steps = zip(by_layout["shared"], by_layout["paired"], strict=True)
    return {"shared_over_paired": spread([b.seconds / a.seconds for a, b in steps])}


@dataclass(frozen=True)
class StepSizes:
    """Tokens and row tokens of measured steps: int64 [2, steps] in the order of LAYOUTS."""

    tokens: np.ndarray
    row_tokens: np.ndarray  # including padding
    rows: np.ndarray

    @property
    def token_ratio(self) -> float:
        """Tokens of the paired layout over those of the shared one, in all steps."""
        return _paired_over_shared(self.tokens)

    @property
    def row_ratio(self) -> float:
        """Row tokens of the paired layout over those of the shared one, in all steps."""
        return _paired_over_shared(self.row_tokens)

    @property
    def unevenness(self) -> float:
        """How far the row tokens' ratio is from the tokens', in all steps and the median step."""
        shared, paired = self.row_tokens / self.tokens
        ratios = self.row_ratio / self.token_ratio, float(np.median(paired / shared))
        return max(abs(ratio - 1) for ratio in ratios)


def _paired_over_shared(counts: np.ndarray) -> float:
    shared, paired = counts.sum(axis=1).tolist()
    return paired / shared


def step_sizes(setting: Setting, data: str, pairs: int) -> StepSizes:
    """Tokens and rows of the measured steps of a data set, packed as in training."""
    num_steps = setting.warmup + setting.steps
    lengths = named_lengths(num_steps * pairs, data, setting.tokens)
    tokens, row_tokens, num_rows = [], [], []
    for layout in LAYOUTS:
        by_step = example_lengths(lengths[:, 0], lengths[:, 1:], layout).reshape(num_steps, pairs)
        steps = by_step[setting.warmup :]
        packed = [shortest_rows(step, setting.tokens) for step in steps]
        tokens.append(steps.sum(axis=1))
        num_rows.append([len(rows) for rows, _ in packed])
        row_tokens.append([len(rows) * size for rows, size in packed])
    return StepSizes(np.array(tokens), np.array(row_tokens), np.array(num_rows))


def pairs_to_compare(setting: Setting, data: str) -> int:
    """The fewest pairs that fill ``setting.rows`` shared rows and whose rows are even.

    If none does, the most even of those tried.
    """
    fewest = pairs_of_a_step(setting, data)
    unevenness: dict[int, float] = {}
    for pairs in np.unique(np.linspace(fewest, _MOST_ROWS * fewest, _TRIED).astype(int)).tolist():
        sizes = step_sizes(setting, data, pairs)
        if sizes.rows[0].min() < setting.rows:
            continue
        if sizes.unevenness <= _EVEN:
            return pairs
        unevenness[pairs] = sizes.unevenness
    return min(unevenness, key=lambda pairs: unevenness[pairs], default=fewest)


def check_rows(setting: Setting) -> None:
    """Raise RuntimeError if a data set's row ratio is more than 2% from its token ratio."""
    for data in setting.layout_data:
        sizes = step_sizes(setting, data, pairs_to_compare(setting, data))
        off = sizes.row_ratio / sizes.token_ratio - 1
        if abs(off) > _MOST_UNEVEN:
            raise RuntimeError(f"{data}: paired over shared row tokens {off:+.1%} off the tokens'")
