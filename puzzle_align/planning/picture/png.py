"""Timelines as a PNG: a line per lane, a colour per model, microbatch numbers in the boxes.

Forwards are light, backwards dark, idle time grey. matplotlib is imported when a picture is made.
"""

from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from puzzle_align.planning.picture.figures import new_figure, write_png
from puzzle_align.planning.picture.panel import (
    Panel,
    idle_share,
    longest,
    time_text,
    time_unit,
    work_of,
)
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
GAP = 0.85  # between panels
WIDTHS = (12.0, 48.0)
FONT = 7.0  # points
DIGIT = 0.065  # width of a digit of that font
BORDER = 0.02  # left free beside a number

Colours = dict[tuple[str, Kind], str]


def save_png(panels: Sequence[Panel], path: Path) -> None:
    """Draw the panels below each other on one time axis; ValueError without matplotlib."""
    heights = [LANE * max(len(panel.timeline.ranks), 1) for panel in panels]
    width = _width(panels)
    height = MARGINS["top"] + sum(heights) + GAP * (len(panels) - 1) + MARGINS["bottom"]
    figure = new_figure(path, width, height)
    colours = _colours(work_of(panels))
    inner = width - MARGINS["left"] - MARGINS["right"]
    top = height - MARGINS["top"]
    end = longest(panels) or 1.0
    for panel, panel_height in zip(panels, heights, strict=True):
        box = (
            MARGINS["left"] / width,
            (top - panel_height) / height,
            inner / width,
            panel_height / height,
        )
        axes = figure.add_axes(box)
        _draw(axes, panel, colours, end, inner)
        top -= panel_height + GAP
    _legend(figure, colours)
    write_png(figure, path)


def _width(panels: Sequence[Panel]) -> float:
    """Width in inches: enough for two digits in the shortest box, within bounds."""
    spans = [span for panel in panels for rank in panel.timeline.ranks for span in rank]
    shortest = min((s.end - s.start for s in spans if s.end > s.start), default=1.0)
    return min(max((2 * DIGIT + 2 * BORDER) * longest(panels) / shortest, WIDTHS[0]), WIDTHS[1])


def _colours(work: Mapping[str, Sequence[Kind]]) -> Colours:
    return {
        (model, kind): light if kind is Kind.FORWARD else dark
        for (model, kinds), (light, dark) in zip(work.items(), cycle(COLOURS), strict=False)
        for kind in kinds
    }


def _draw(axes: "Axes", panel: Panel, colours: Colours, end: float, inches: float) -> None:
    """Draw one panel, on an axis from 0 to ``end`` seconds that is ``inches`` wide."""
    unit, unit_name = time_unit(end)
    num_ranks = len(panel.timeline.ranks)
    for rank, spans in enumerate(panel.timeline.ranks):
        axes.broken_barh([(0, panel.timeline.makespan / unit)], (rank - BAR / 2, BAR), color=IDLE)
        axes.broken_barh(
            [(span.start / unit, (span.end - span.start) / unit) for span in spans],
            (rank - BAR / 2, BAR),
            facecolors=[colours[span.action.model, span.action.kind] for span in spans],
            edgecolors="white",
            linewidth=0.5,
        )
        for span in spans:
            _number(axes, span, rank, unit, (span.end - span.start) / end * inches)
    for mark in panel.marks:
        axes.axvline(mark / unit, color="black", linewidth=1, linestyle=(0, (4, 2)))
    axes.set_xlim(0, end / unit)
    axes.set_ylim(num_ranks - 0.5, -0.5)
    axes.set_yticks(range(num_ranks), panel.lanes)
    axes.tick_params(labelsize=8, left=False)
    axes.set_xlabel(unit_name, fontsize=8, loc="right", labelpad=-2)
    axes.spines[["top", "right", "left"]].set_visible(False)
    idle = fmean(idle_share(panel.timeline, rank) for rank in range(num_ranks))
    summary = f"makespan {time_text(panel.timeline.makespan)}, idle {100 * idle:.1f}%"
    axes.set_title(f"{panel.title}: {summary}", fontsize=9, loc="left")


def _number(axes: "Axes", span: Span, rank: int, unit: float, inches: float) -> None:
    """Write the microbatch in the middle of a box, if it fits; the axis is ``inches`` wide."""
    number = str(span.action.microbatch)
    if len(number) * DIGIT + 2 * BORDER > inches:
        return
    axes.text(
        (span.start + span.end) / 2 / unit,
        rank,
        number,
        color=INK[span.action.kind],
        fontsize=FONT,
        ha="center",
        va="center_baseline",
        clip_on=True,
    )


def _legend(figure: "Figure", colours: Colours) -> None:
    from matplotlib.patches import Patch

    patches = [
        Patch(color=colour, label=f"{model} {kind.name.lower()}")
        for (model, kind), colour in colours.items()
    ]
    patches.append(Patch(color=IDLE, label="idle"))
    corner = (MARGINS["left"] / figure.get_figwidth(), 1.0)
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
