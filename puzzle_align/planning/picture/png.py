"""Timelines as a PNG: a line per lane, a colour per model, microbatch numbers in the boxes.

Forwards are light, backwards dark, idle time grey. matplotlib is imported when a picture is made.
"""

from collections.abc import Mapping, Sequence
from itertools import cycle, pairwise, product
from math import ceil
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from puzzle_align.planning.picture.figures import new_figure, write_png
from puzzle_align.planning.picture.panel import Panel, longest, time_unit, work_of
from puzzle_align.schedules.actions import Kind
from puzzle_align.schedules.timeline import Span

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Colours of forwards and backwards, one pair per model; colour-blind readers can tell them apart.
COLOURS = (
    ("#9ecdf0", "#0072b2"),
    ("#fbd48a", "#c26a00"),
    ("#97dcc4", "#00795a"),
    ("#e6bfd6", "#9c4577"),
    ("#f4ee9b", "#a39a00"),
    ("#d0d0f5", "#5a5ac0"),
)
IDLE = "#e4e4e4"
INK = {Kind.FORWARD: "black", Kind.BACKWARD: "white"}
LANE = 0.34  # inches from lane to lane; all sizes below are inches too
BAR = 0.8  # of a lane's height
MARGINS = {"left": 0.7, "right": 0.2, "top": 0.75, "bottom": 0.5}
GAP, ROW_GAP = 0.85, 0.5  # between panels, and between a panel's rows
WIDTH = 16.0  # 1,920 pixels
INNER = WIDTH - MARGINS["left"] - MARGINS["right"]  # of the axes
MOST_ROWS = 4  # into which a panel is wrapped, so that two digits fit in its shortest box
FONT = 7.0  # points
DIGIT = 0.065  # width of a digit of that font
BORDER = 0.02  # left free beside a number
THINNED = (1, 2, 4, 5, 10, 20, 50, 100)  # every so many microbatches have a number

Colours = dict[tuple[str, Kind], str]


def save_png(panels: Sequence[Panel], path: Path) -> None:
    """Draw the panels below each other on one time axis; ValueError without matplotlib.

    A long axis is wrapped: a panel then has several rows, each of the same length of time.
    """
    end = longest(panels) or 1.0
    num_rows = _num_rows(panels)
    rows = [
        (panel, row)
        for panel in panels
        for row in range(num_rows)
        if row == 0 or panel.timeline.makespan > row * end / num_rows
    ]
    heights = [LANE * max(len(panel.timeline.ranks), 1) for panel, _ in rows]
    gaps = [GAP if row == 0 else ROW_GAP for _, row in rows[1:]] + [0.0]
    height = MARGINS["top"] + sum(heights) + sum(gaps) + MARGINS["bottom"]
    figure = new_figure(path, WIDTH, height)
    colours = _colours(work_of(panels))
    top = height - MARGINS["top"]
    for (panel, row), row_height, gap in zip(rows, heights, gaps, strict=True):
        box = (MARGINS["left"] / WIDTH, (top - row_height) / height)
        axes = figure.add_axes((*box, INNER / WIDTH, row_height / height))
        _draw(axes, panel, colours, row * end / num_rows, (row + 1) * end / num_rows)
        top -= row_height + gap
    _legend(figure, colours)
    write_png(figure, path)


def _num_rows(panels: Sequence[Panel]) -> int:
    """Rows of the longest panel: enough for two digits in the shortest box, within bounds."""
    spans = [span for panel in panels for rank in panel.timeline.ranks for span in rank]
    shortest = min((s.end - s.start for s in spans if s.end > s.start), default=1.0)
    inches = (2 * DIGIT + 2 * BORDER) * longest(panels) / shortest
    return min(max(ceil(inches / INNER), 1), MOST_ROWS)


def _colours(work: Mapping[str, Sequence[Kind]]) -> Colours:
    return {
        (model, kind): light if kind is Kind.FORWARD else dark
        for (model, kinds), (light, dark) in zip(work.items(), cycle(COLOURS), strict=False)
        for kind in kinds
    }


def _draw(axes: "Axes", panel: Panel, colours: Colours, start: float, end: float) -> None:
    """Draw a panel from ``start`` to ``end``."""
    unit, unit_name = (0.01, "%") if panel.in_shares else time_unit(end)
    num_ranks, makespan = len(panel.timeline.ranks), panel.timeline.makespan
    for rank, spans in enumerate(panel.timeline.ranks):
        seen = [
            Span(span.action, max(span.start, start), min(span.end, end))
            for span in spans
            if span.end > start and span.start < end
        ]
        axes.broken_barh([(0, makespan / unit)], (rank - BAR / 2, BAR), color=IDLE)
        axes.broken_barh(
            [(span.start / unit, (span.end - span.start) / unit) for span in seen],
            (rank - BAR / 2, BAR),
            facecolors=[colours[span.action.model, span.action.kind] for span in seen],
            edgecolors="white",
            linewidth=0.5,
        )
        _number(axes, seen, rank, unit, INNER / (end - start))
    for mark in panel.marks:
        axes.axvline(mark / unit, color="black", linewidth=1, linestyle=(0, (4, 2)))
    axes.set_xlim(start / unit, end / unit)
    axes.set_ylim(num_ranks - 0.5, -0.5)
    axes.set_yticks(range(num_ranks), panel.lanes)
    axes.tick_params(labelsize=8, left=False)
    axes.set_xlabel(unit_name, fontsize=8, loc="right", labelpad=1)
    axes.spines[["top", "right", "left"]].set_visible(False)
    if start == 0:
        idle = 100 * panel.timeline.idle_share()
        summary = f"makespan {panel.time_text(makespan)}, idle {idle:.1f}%"
        axes.set_title(f"{panel.title}: {summary}", fontsize=9, loc="left")


def _number(axes: "Axes", spans: Sequence[Span], rank: int, unit: float, scale: float) -> None:
    """Write microbatches' numbers into a rank's boxes; ``scale`` is inches a unit of time."""
    for span in _numbered(spans, scale):
        axes.text(
            (span.start + span.end) / 2 / unit,
            rank,
            str(span.action.microbatch),
            color=INK[span.action.kind],
            fontsize=FONT,
            ha="center",
            va="center_baseline",
            clip_on=True,
        )


def _numbered(spans: Sequence[Span], scale: float) -> list[Span]:
    """Boxes whose numbers are written: all that have room, else every second, fourth, ... one.

    Numbers may overlap edges of boxes but not one another; if needed, only backwards are numbered.
    """

    def width(span: Span) -> float:
        return len(str(span.action.microbatch)) * DIGIT + BORDER

    usual = median(span.end - span.start for span in spans) * scale if spans else 0.0
    if usual >= max(map(width, spans), default=0.0):
        return [span for span in spans if (span.end - span.start) * scale >= width(span)]
    trained = {span.action.model for span in spans if span.action.kind is Kind.BACKWARD}
    chosen: list[Span] = []
    for every, both in product(THINNED, (True, False)):
        chosen = [
            span
            for span in spans
            if span.action.microbatch % every == 0
            and (both or span.action.kind is Kind.BACKWARD or span.action.model not in trained)
        ]
        middles = [(span.start + span.end) / 2 * scale for span in chosen]
        rooms = [(width(one) + width(next_one)) / 2 for one, next_one in pairwise(chosen)]
        if all(y - x >= room for (x, y), room in zip(pairwise(middles), rooms, strict=True)):
            return chosen
    return chosen


def _legend(figure: "Figure", colours: Colours) -> None:
    from matplotlib.patches import Patch

    patches = [
        Patch(color=colour, label=f"{model} {kind.name.lower()}")
        for (model, kind), colour in colours.items()
    ]
    patches.append(Patch(color=IDLE, label="idle"))
    corner = (MARGINS["left"] / WIDTH, 1.0)
    figure.legend(
        handles=patches,
        loc="upper left",
        bbox_to_anchor=corner,
        borderaxespad=0.3,
        borderpad=0.3,
        ncols=len(patches),
        fontsize=8,
        frameon=False,
    )
