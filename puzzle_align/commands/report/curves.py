"""Curves of metrics over steps, as SVG.

The ``data-points`` of a curve are its steps and values as they are in the file; the page's script
and the tests read them. Where a value was not finite, the curve is broken. Of a curve of more than
``MOST_POINTS`` each piece keeps its lowest and highest point, so that no peak is lost.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from puzzle_align.commands.report.html import Html, element
from puzzle_align.telemetry.text import quantity

MOST_POINTS = 600
WIDTH, HEIGHT = 360, 190
LEFT, RIGHT, TOP, BOTTOM = 50, 350, 8, 168  # edges of the axes
_LOST = 1e-9  # a range below this share of its values is drawn as none
_TINIEST = 1e-290

Point = tuple[int, float | None]  # step and value; None: not finite


@dataclass(frozen=True)
class Curve:
    """Values of a metric in one run, by whose number it is coloured; at least one point."""

    run: int
    label: str
    points: Sequence[Point]
    is_eval: bool


def chart(title: str, curves: Sequence[Curve]) -> Html:
    """Draw the curves of one metric over each other, with their last values below."""
    points = [point for curve in curves for point in curve.points]
    first, last = _range([step for step, _ in points])
    low, high = _range([value for _, value in points if value is not None] or [0.0], margin=0.04)

    def x(step: float) -> str:
        return f"{LEFT + (step - first) / (last - first) * (RIGHT - LEFT):.1f}"

    def y(value: float) -> str:
        return f"{BOTTOM - (value - low) / (high - low) * (BOTTOM - TOP):.1f}"

    parts = []
    for value, label in labelled(ticks(low, high, 4)):
        parts.append(element("line", x1=LEFT, x2=RIGHT, y1=y(value), y2=y(value)))
        parts.append(element("text", label, x=LEFT - 5, y=y(value), class_="left"))
    for step, label in labelled([at for at in ticks(first, last, 5) if at == round(at)]):
        parts.append(element("text", label, x=x(step), y=BOTTOM + 14))
    for curve in curves:
        places = [(x(s), None if v is None else y(v)) for s, v in thinned(curve.points)]
        parts.append(_drawn(curve, places))
    parts.append(element("line", class_="cursor", y1=TOP, y2=BOTTOM))
    scale = {"data_left": LEFT, "data_right": RIGHT, "data_first": first, "data_last": last}
    box, name = f"0 0 {WIDTH} {HEIGHT}", f"{title} over steps"
    picture = element("svg", *parts, viewBox=box, role="img", aria_label=name, **scale)
    below = element("p", element("span", "last"), *map(_last, curves), class_="values")
    return element("figure", element("figcaption", title), picture, below, class_="chart")


def thinned(points: Sequence[Point]) -> list[Point]:
    """At most about ``MOST_POINTS`` of the points, and all that are not finite."""
    size = math.ceil(2 * len(points) / MOST_POINTS) if len(points) > MOST_POINTS else 1
    kept = {points[-1], *(point for point in points if point[1] is None)}
    for start in range(0, len(points), size):
        piece = sorted((v, s) for s, v in points[start : start + size] if v is not None)
        kept |= {(step, value) for value, step in (*piece[:1], *piece[-1:])}
    return sorted(kept, key=lambda point: point[0])


def ticks(low: float, high: float, most: int) -> list[float]:
    """At most ``most`` + 1 round numbers from ``low`` to ``high``, equally spaced."""
    step = 10.0 ** math.floor(math.log10((high - low) / most))
    step *= next(factor for factor in (1, 2, 5, 10) if (high - low) / (step * factor) <= most)
    return [step * n for n in range(math.ceil(low / step), math.floor(high / step) + 1)]


def labelled(values: Sequence[float]) -> list[tuple[float, str]]:
    """The values with their labels, of as many digits as tell them apart."""
    labels = [quantity(value) for value in values]
    for digits in range(4, 17):
        if len({*labels}) < len(values):
            labels = [f"{value:.{digits}g}" for value in values]
    return list(zip(values, labels, strict=True))


def _range(values: Sequence[float], margin: float = 0.0) -> tuple[float, float]:
    """Least and greatest value, with a margin as a share; widened if they are nearly equal."""
    low, high = min(values), max(values)
    most = max(abs(low), abs(high))
    if high - low <= _LOST * max(most, _TINIEST):
        return low - (0.1 * most or 1.0), high + (0.1 * most or 1.0)
    return low - margin * (high - low), high + margin * (high - low)


def _drawn(curve: Curve, places: Sequence[tuple[str, str | None]]) -> Html:
    line, pen = "", "M"
    for x, y in places:
        line += "" if y is None else f"{pen}{x} {y}"
        pen = "M" if y is None else "L"
    known = [f"{step}:{value!r}" for step, value in thinned(curve.points) if value is not None]
    path = element("path", d=line, data_points=" ".join(known))
    dots = [(x, y) for x, y in places if y is not None and (curve.is_eval or len(places) == 1)]
    circles = [element("circle", cx=x, cy=y, r=2.5) for x, y in dots]
    return element("g", path, *circles, class_=f"run{curve.run}{' eval' * curve.is_eval}")


def _last(curve: Curve) -> Html:
    value = curve.points[-1][1]
    shown = "not finite" if value is None else f"{float(f'{value:.4g}'):.10g}"
    return element("span", f"{curve.label} ", element("b", shown), class_=f"run{curve.run}")
