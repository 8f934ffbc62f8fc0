"""Figures as PNG files; matplotlib is imported when one is made.

``save_scaling`` draws throughput over the size of a cluster, and the phases that limit it.
``save_traffic`` draws the bytes between ranks, one row per sender and one column per receiver;
below, in the same columns, the bytes that every rank receives, and the least that it must receive.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DPI = 120


def new_figure(path: Path, width: float, height: float) -> "Figure":
    """An empty figure, sizes in inches, for ``path``; ValueError without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError(
            f"{path}: a PNG is drawn by matplotlib, which cannot be imported ({error}); "
            "pip install 'puzzle-align[plot]'"
        ) from error
    return Figure(figsize=(width, height), dpi=DPI)


def write_png(figure: "Figure", path: Path) -> None:
    """Write the figure (folders are made as needed)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png")


@dataclass(frozen=True)
class Point:
    """The best plan on ``num_ranks``: examples per second, and seconds by phase."""

    num_ranks: int
    rate: float
    phases: Mapping[str, float]


def save_scaling(points: Sequence[Point], path: Path) -> None:
    """Draw the points; ValueError without matplotlib.

    Above is the throughput beside linear scaling, below the ranks' time for an example by phase:
    where all scales linearly its bars are equally high, and the phase that grows is what limits.
    """
    figure = new_figure(path, 6.0, 6.0)
    figure.set_layout_engine("constrained")
    above, below = figure.subplots(2, 1, height_ratios=(3, 2))
    _draw_rates(above, points)
    _draw_phases(below, points)
    write_png(figure, path)


def _draw_rates(axes: "Axes", points: Sequence[Point]) -> None:
    ranks, first = [point.num_ranks for point in points], points[0]
    linear = [first.rate * number / first.num_ranks for number in ranks]
    axes.plot(ranks, linear, "--", color="0.6", label="in proportion")
    axes.plot(ranks, [point.rate for point in points], "o-", color=DARK, label="predicted")
    for point, ideal in list(zip(points, linear, strict=True))[1:]:  # the first is 100%
        text, place = f"{100 * point.rate / ideal:.0f}%", (point.num_ranks, point.rate)
        axes.annotate(text, place, (5, -11), textcoords="offset points", fontsize=8)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(ranks, [str(number) for number in ranks])
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_ylabel("examples a second")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)


def _draw_phases(axes: "Axes", points: Sequence[Point]) -> None:
    places, bottoms = range(len(points)), [0.0] * len(points)
    for name in dict.fromkeys(name for point in points for name in point.phases):
        heights = [
            point.phases.get(name, 0.0)
            * point.num_ranks
            / (sum(point.phases.values()) * point.rate)
            for point in points
        ]
        axes.bar(places, heights, 0.6, bottoms, label=name)
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    axes.set_xticks(places, [str(point.num_ranks) for point in points])
    axes.set_xlabel("ranks")
    axes.set_ylabel("rank-seconds an example")
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)


LIGHT, DARK = "#ffffff", "#0072b2"  # colours of no traffic and of the busiest link
RECEIVED, BOUND = "#9ecdf0", "#d55e00"
NUMBERED, LABELLED = 20, 32  # most ranks for numbers in cells, and for a name on every rank
UNITS = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B"))


@dataclass(frozen=True)
class Traffic:
    """Bytes between ranks: by (sender, receiver), and the least by receiver."""

    title: str
    ranks: tuple[int, ...]
    links: Mapping[tuple[int, int], int]
    least: Mapping[int, int]

    @property
    def received(self) -> list[int]:
        """Bytes received by each of ``ranks``."""
        columns = ([self.links.get((s, r), 0) for s in self.ranks] for r in self.ranks)
        return [sum(column) for column in columns]


def save_traffic(traffic: Traffic, path: Path) -> None:
    """Draw the traffic (folders are made as needed); ValueError without matplotlib."""
    side = min(max(0.5 * len(traffic.ranks), 2.5), 8.0)  # inches of the matrix, about
    figure = new_figure(path, side + 1.0, side + 3.2)
    figure.set_layout_engine("constrained")
    matrix, bars = figure.subplots(2, 1, sharex=True, height_ratios=(side, 1.4))
    _draw_matrix(matrix, traffic)
    _draw_bars(bars, traffic)
    figure.suptitle(traffic.title, fontsize=9)
    write_png(figure, path)


def _draw_matrix(axes: "Axes", traffic: Traffic) -> None:
    from matplotlib.colors import LinearSegmentedColormap

    ranks = traffic.ranks
    rows = [[traffic.links.get((sender, to), 0) for to in ranks] for sender in ranks]
    most = max(map(max, rows), default=0)
    length, unit = _unit(most)
    colours = LinearSegmentedColormap.from_list("traffic", [LIGHT, DARK])
    axes.imshow(rows, cmap=colours, vmin=0, vmax=most or 1, aspect="auto", interpolation="nearest")
    for y, row in enumerate(rows if len(ranks) <= NUMBERED else ()):
        for x, size in enumerate(row):
            ink = "white" if 2 * size > most else "black"
            text = f"{size / length:.3g}" if size else ""
            axes.text(x, y, text, color=ink, fontsize=7, ha="center", va="center")
    step = -(-len(ranks) // LABELLED)
    for set_ticks in (axes.set_xticks, axes.set_yticks):
        set_ticks(range(0, len(ranks), step), [str(rank) for rank in ranks[::step]])
    axes.tick_params(labelsize=7, length=2, labelbottom=True)
    axes.set_ylabel("from rank", fontsize=8)
    title = f"{unit} from rank to rank, {most / length:.3g} at most"
    axes.set_title(title, fontsize=8, loc="right", pad=3)


def _draw_bars(axes: "Axes", traffic: Traffic) -> None:
    received = traffic.received
    least = [traffic.least.get(rank, 0) for rank in traffic.ranks]
    length, unit = _unit(max((*received, *least), default=0))
    places = range(len(received))
    axes.bar(places, [size / length for size in received], 0.8, color=RECEIVED, label="received")
    lefts, rights = [x - 0.4 for x in places], [x + 0.4 for x in places]
    heights = [size / length for size in least]
    bounds = axes.hlines(heights, lefts, rights, colors=BOUND, linewidth=1.5, label="lower bound")
    bounds.set(zorder=3, clip_on=False)  # a bound of 0 lies on the axis
    axes.tick_params(labelsize=7, length=2)
    axes.set_ylim(0, 1.15 * max((*received, *least, 1)) / length)
    axes.set_ylabel(unit, fontsize=8)
    axes.set_xlabel("to rank", fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=2, fontsize=7, frameon=False)


def _unit(size: int) -> tuple[int, str]:
    """A readable unit for sizes up to this one: its bytes, and its name."""
    return next(((length, name) for length, name in UNITS if size >= length), UNITS[-1])
