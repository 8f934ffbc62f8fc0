"""Values between measured points, and whether they lie beyond them.

Two variables: a size (tokens of a row, sequences of a batch) and how much each unit of it has to do
(pairs a token, predictions a token, context). Along both, values are linear between neighbouring
points; beyond the last they go on as between the last two, but never below a quarter of the nearest
value, and are flagged.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

TOLERANCE = 0.05  # how far beyond the measured points, in relation, is not yet beyond
_LEAST = 0.25


@dataclass(frozen=True)
class Estimate:
    """A value, and whether a point beyond the measured ones was asked for."""

    value: float
    beyond: bool = False


class Line:
    """Values by one variable."""

    def __init__(self, points: Iterable[tuple[float, float]]) -> None:
        """``points`` are ``(variable, value)``, at least one, in any order."""
        self._points = sorted(points)
        assert self._points, "nothing was measured"

    def at(self, x: float) -> Estimate:
        """The value at ``x``; of a single point, its value everywhere."""
        points = self._points
        low, high = points[0][0], points[-1][0]
        beyond = x < low * (1 - TOLERANCE) or x > high * (1 + TOLERANCE)
        if len(points) == 1:
            return Estimate(points[0][1], beyond)
        number = min(max(bisect_left(points, (x,)), 1), len(points) - 1)
        (x0, y0), (x1, y1) = points[number - 1], points[number]
        value = y0 + (y1 - y0) * (x - x0) / (x1 - x0)
        nearest = y0 if abs(x - x0) < abs(x - x1) else y1
        return Estimate(max(value, _LEAST * nearest), beyond)


@dataclass(frozen=True)
class Sheet:
    """Values by a size and by what a unit of it has to do: ``(size, each, value)``."""

    points: Sequence[tuple[float, float, float]]

    @cached_property
    def _lines(self) -> list[tuple[float, Line]]:
        """By size, the values by what a unit has to do."""
        sizes = sorted({size for size, _, _ in self.points})
        return [(x, Line((each, v) for size, each, v in self.points if size == x)) for x in sizes]

    def at(self, size: float, each: float) -> Estimate:
        """The value of ``size`` units that have ``each`` to do."""
        along = [(own, line.at(each)) for own, line in self._lines]
        if len(along) == 1:  # in proportion: nothing else is known
            own, found = along[0]
            beyond = found.beyond or abs(size - own) > TOLERANCE * own
            return Estimate(found.value * size / own, beyond)
        found = Line((own, estimate.value) for own, estimate in along).at(size)
        near = sorted(along, key=lambda item: abs(item[0] - size))[:2]
        return Estimate(found.value, found.beyond or any(e.beyond for _, e in near))
