"""Steps of both layouts and of several backends on the same pairs, in turns.

A step computes whole rows, padding too: with few rows its time follows their number, not its
tokens. So a step has as many pairs as make the ratio of the layouts' rows that of their tokens,
within 2% at the full report's sizes, and fill at least ``Setting.rows`` rows.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
from bench_cases import named_lengths
from dpo_steps import Stack, Step, run_step, summarize

from puzzle_align.data.packing import example_lengths, first_fit_decreasing
from puzzle_align.layout.model import AttentionBackend
from report.process import Results
from report.setting import Setting, open_dataset, pairs_of_a_step, reason_of, rows_of
from report.watch import gpu_query, spread, watched

LAYOUTS = ("shared", "paired")
_EVEN = 0.0175  # of the ratio: a report asks for 0.97 of the tokens'
_MOST_ROWS = 1.4  # times Setting.rows
_TRIED = 40  # numbers of pairs at most; packing them takes a tenth of a second


def compare_all(
    setting: Setting, stack: Stack, data: Sequence[str], names: Sequence[AttentionBackend]
) -> Iterator[tuple[str, Results]]:
    """Compare both layouts on each data set; only the first one needs a warm-up.

    All rows have the same shape, so that nothing is compiled or allocated later.
    """
    for number, name in enumerate(data):
        yield name, compare(replace(setting, warmup=0) if number else setting, stack, name, names)


def compare(
    setting: Setting,
    stack: Stack,
    data: str,
    names: Sequence[AttentionBackend],
    layouts: Sequence[str] = LAYOUTS,
) -> Results:
    """Time steps of a data set's lengths, by layout and backend, in turns; leave out what fails.

    Every variant runs one measured step; then the fastest one of each layout runs the others.
    """
    both = len(layouts) > 1
    pairs = pairs_to_compare(setting, data) if both else pairs_of_a_step(setting, data)
    num_steps = setting.warmup + setting.steps
    dataset = open_dataset(setting, data, num_steps, pairs)
    rows = {
        f"{layout}+{name}": rows_of(setting, dataset, layout, pairs, name)
        for layout, name in product(layouts, names)
    }
    measured: dict[str, list[Step]] = {name: [] for name in rows}
    failed: dict[str, str] = {}
    running, gpu = list(rows), Results()
    with ExitStack() as watching:
        for step in range(num_steps):
            if step == setting.warmup:
                gpu = watching.enter_context(watched(gpu_query(setting.device)))
            for name in running:
                try:
                    done = run_step(stack, rows[name], step)
                except Exception as error:  # noqa: BLE001 - see reason_of
                    failed[name] = reason_of(error)
                    continue
                if step >= setting.warmup:
                    measured[name].append(done)
            running = [name for name in running if name not in failed]
            if step == setting.warmup:
                running = _fastest_by_layout(measured, running)
    results: Results = {
        "pairs_per_step": pairs,
        "gpu": gpu or None,
        "variants": {
            name: summarize(steps, stack.spec, 1) for name, steps in measured.items() if steps
        },
        "failed": failed,
    }
    if both:
        sizes = step_sizes(setting, data, pairs)
        results |= {"token_ratio": sizes.token_ratio, "row_ratio": sizes.row_ratio}
        results |= _shared_over_paired(measured, running)
    return results


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
    """Tokens and rows of measured steps, by layout: int64 [2, steps] in the order of LAYOUTS."""

    tokens: np.ndarray
    rows: np.ndarray

    @property
    def token_ratio(self) -> float:
        """Tokens of the paired layout over those of the shared one, in all steps."""
        return _paired_over_shared(self.tokens)

    @property
    def row_ratio(self) -> float:
        """Rows of the paired layout over those of the shared one, in all steps."""
        return _paired_over_shared(self.rows)

    @property
    def unevenness(self) -> float:
        """How far the rows' ratio is from the tokens', in all steps and in the median step."""
        shared, paired = self.rows / self.tokens
        ratios = self.row_ratio / self.token_ratio, float(np.median(paired / shared))
        return max(abs(ratio - 1) for ratio in ratios)


def _paired_over_shared(counts: np.ndarray) -> float:
    shared, paired = counts.sum(axis=1).tolist()
    return paired / shared


def step_sizes(setting: Setting, data: str, pairs: int) -> StepSizes:
    """Tokens and rows of the measured steps of a data set, packed as in training."""
    num_steps = setting.warmup + setting.steps
    lengths = named_lengths(num_steps * pairs, data, setting.tokens)
    tokens, rows = [], []
    for layout in LAYOUTS:
        by_step = example_lengths(lengths[:, 0], lengths[:, 1:], layout).reshape(num_steps, pairs)
        steps = by_step[setting.warmup :]
        tokens.append(steps.sum(axis=1))
        rows.append([len(first_fit_decreasing(step, setting.tokens)) for step in steps])
    return StepSizes(np.array(tokens), np.array(rows))


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
