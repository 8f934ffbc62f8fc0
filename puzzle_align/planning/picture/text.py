"""Timelines as text: one line per lane, columns of equal time.

Without colours ``a3--`` is a forward of microbatch 3 of model ``a``, ``A3====`` its backward; with
terminal colours a box has the number alone. ``.`` is idle time. A column shows the action in its
middle, so an action shorter than a column may not appear.
"""

import string
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from statistics import median

from puzzle_align.planning.picture.panel import Panel, longest, work_of
from puzzle_align.schedules.actions import Action, Kind
from puzzle_align.schedules.timeline import Span

IDLE = "."
FILL = {Kind.FORWARD: "-", Kind.BACKWARD: "="}
# Terminal colours (of 256) of a model's forwards, with black text, and backwards, with white text.
COLOURS = ((117, 25), (222, 130), (157, 28), (183, 91), (217, 124), (253, 240))
INK = {Kind.FORWARD: 16, Kind.BACKWARD: 231}
SAMPLE = 4  # columns of a box in the legend


@dataclass(frozen=True)
class _Style:
    letter: str
    paper: Mapping[Kind, int] | None  # None: no colours


def draw_text(panels: Sequence[Panel], width: int, *, colour: bool = False) -> str:
    """Draw the panels below each other, on one time scale, at most ``width`` characters wide.

    Below each panel are its makespan and its ranks' idle shares, below all a legend. ``colour``
    adds ANSI colour codes.
    """
    work = work_of(panels)
    styles = _styles(list(work), colour)
    margin = 1 + max((len(name) for panel in panels for name in panel.lanes), default=0)
    column = _column(panels, max(width - margin, 1))
    lines = []
    for panel in panels:
        lines.append(panel.title)
        for rank, name in enumerate(panel.lanes):
            cells = _cells(panel, rank, column)
            boxes = "".join(_box(span, count, styles) for span, count in cells)
            lines.append(f"{name:<{margin}}{boxes}")
        lines += [" " * margin + _axis(panel, column), _summary(panel), ""]
    lines.append(_legend(work, styles))
    if column > (_usual_forward(panels) or column):
        lines.append("A column is longer than a forward: not every action is seen.")
    return "\n".join(lines) + "\n"


def _styles(models: Sequence[str], colour: bool) -> dict[str, _Style]:
    """A different letter for every model, from its name if one is free."""
    styles: dict[str, _Style] = {}
    for model, (light, dark) in zip(models, cycle(COLOURS), strict=False):
        taken = {style.letter for style in styles.values()}
        wanted = model.lower() + string.ascii_lowercase
        letter = next(c for c in wanted if c in string.ascii_lowercase and c not in taken)
        paper = {Kind.FORWARD: light, Kind.BACKWARD: dark}
        styles[model] = _Style(letter, paper if colour else None)
    return styles


def _column(panels: Sequence[Panel], num_columns: int) -> float:
    """Seconds of a column; if the width allows, a typical forward is a whole number of columns."""
    column = longest(panels) / num_columns or 1.0
    usual = _usual_forward(panels)
    return usual / int(usual / column) if usual >= column else column


def _usual_forward(panels: Sequence[Panel]) -> float:
    """Median time of a forward; 0 without forwards."""
    spans = (span for panel in panels for rank in panel.timeline.ranks for span in rank)
    times = [s.end - s.start for s in spans if s.action.kind is Kind.FORWARD]
    return median(times) if times else 0.0


def _cells(panel: Panel, rank: int, column: float) -> Iterator[tuple[Span | None, int]]:
    """``(action, or None for idle time; number of columns)`` from 0 to the panel's makespan."""
    at = 0
    for span in panel.timeline.ranks[rank]:
        start, end = round(span.start / column), round(span.end / column)
        yield None, start - at
        yield span, end - start
        at = end
    yield None, round(panel.timeline.makespan / column) - at


def _box(span: Span | None, count: int, styles: Mapping[str, _Style]) -> str:
    """``count`` columns of a line, with the microbatch's number if it fits."""
    if count <= 0:
        return ""
    if span is None:
        return IDLE * count
    style, kind, number = styles[span.action.model], span.action.kind, str(span.action.microbatch)
    if style.paper is not None:
        text = (number if len(number) <= count else "").ljust(count)
        return f"\033[38;5;{INK[kind]};48;5;{style.paper[kind]}m{text}\033[0m"
    letter = style.letter if kind is Kind.FORWARD else style.letter.upper()
    name = letter + number
    return (name if len(name) <= count else letter).ljust(count, FILL[kind])


def _axis(panel: Panel, column: float) -> str:
    """Axis with ``|`` and the time at 0, at every mark and at the makespan, if they fit."""
    makespan = panel.timeline.makespan
    last = f"{panel.time_text(makespan)}|"
    end = round(makespan / column) - len(last)
    line = ""
    for time in (0.0, *panel.marks):
        at, tick = round(time / column), f"|{panel.time_text(time)} "
        if len(line) <= at <= end - len(tick):
            line = f"{line:<{at}}{tick}"
    return f"{line:<{end}}{last}" if end > 0 else last


def _summary(panel: Panel) -> str:
    shares = " ".join(
        f"{name} {100 * panel.timeline.idle_share(rank):.1f}%"
        for rank, name in enumerate(panel.lanes)
    )
    return f"makespan {panel.time_text(panel.timeline.makespan)}, idle {shares}"


def _legend(work: Mapping[str, Sequence[Kind]], styles: Mapping[str, _Style]) -> str:
    """Legend: a box (of microbatch 0) and a name for every model and kind."""
    parts = []
    for model, kinds in work.items():
        for kind in kinds:
            sample = Span(Action(model, kind, 0, 0), 0.0, 0.0)
            parts.append(f"{_box(sample, SAMPLE, styles)} {model} {kind.name.lower()}")
    return "  ".join([*parts, f"{IDLE * SAMPLE} idle"])
