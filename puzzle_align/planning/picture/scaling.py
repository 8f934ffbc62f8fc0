"""Throughput over the size of a cluster as a PNG, beside what it would be in proportion."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from puzzle_align.planning.picture.figure import new_figure, write_png


@dataclass(frozen=True)
class Point:
    """Examples a second on so many ranks."""

    num_ranks: int
    rate: float


def save_scaling(points: Sequence[Point], path: Path) -> None:
    """Draw the points. ValueError without matplotlib."""
    figure = new_figure(path, 6.0, 4.0)
    axes = figure.subplots()
    ranks = [point.num_ranks for point in points]
    first = points[0]
    ideal = [first.rate * number / first.num_ranks for number in ranks]
    axes.plot(ranks, ideal, "--", color="0.6", label="in proportion")
    axes.plot(ranks, [point.rate for point in points], "o-", label="predicted")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(ranks, [str(number) for number in ranks])
    axes.set_xlabel("ranks")
    axes.set_ylabel("examples a second")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    write_png(figure, path)
