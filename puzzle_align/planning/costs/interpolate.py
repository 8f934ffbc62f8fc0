"""Values between measured points, and whether they lie beyond them.

Two variables: a size (tokens of a row, sequences of a batch) and how much each unit of it has to do
(pairs a token, predictions a token, context). Along both, values are linear between neighbouring
points; beyond the last they go on as between the last two, but never below a quarter of the nearest
value, and are flagged.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from functools import cached_property
from statistics import fmean
from typing import NamedTuple

TOLERANCE = 0.05  # how far beyond the measured points, in relation, is not yet beyond
_LEAST = 0.25


class Estimate(NamedTuple):
    """A value, and whether a point beyond the measured ones was asked for."""

    value: float
    beyond: bool = False


class Line:
    """Values by one variable."""

    def __init__(self, points: Iterable[tuple[float, float]]) -> None:
        """``points`` are ``(variable, value)``, at least one, in any order.

        Of several at one place it is the mean.
        """
        values: dict[float, list[float]] = {}
        for x, value in points:
            values.setdefault(x, []).append(value)
        assert values, "nothing was measured"
        self._at = sorted(values)
        self._values = [fmean(values[x]) for x in self._at]

    def at(self, x: float) -> Estimate:
        """The value at ``x``; of a single point, its value everywhere."""
        beyond = _is_beyond(x, self._at)
        if len(self._at) == 1:
            return Estimate(self._values[0], beyond)
        low = _below(x, self._at)
        return Estimate(_between(x, self._at[low : low + 2], self._values[low : low + 2]), beyond)

    @property
    def least_each(self) -> float:
        """The least that a unit of a variable above 0 counts, wherever it is."""
        if len(self._at) == 1:
            return 0.0
        at, values = self._at, self._values
        first, last = (
            (values[n + 1] - values[n]) / (at[n + 1] - at[n]) for n in (0, len(at) - 2)
        )  # the slopes outside
        ratios = [last, *(y / x for x, y in zip(at, values, strict=True) if x > 0)]
        if first > 0:
            lowest = at[0] - (1 - _LEAST) * values[0] / first  # where a quarter is reached
            ratios += [_LEAST * values[0] / lowest] if lowest > 0 else []
        return max(0.0, min(ratios))


class Sheet:
    """Values by a size and by what a unit of it has to do: ``(size, each, value)``."""

    def __init__(self, points: Sequence[tuple[float, float, float]]) -> None:
        self._points = points

    @cached_property
    def _sizes(self) -> list[float]:
        return sorted({size for size, _, _ in self._points})

    @cached_property
    def _lines(self) -> list[Line]:
        """Lines of the values over the work of a unit, by size."""
        return [Line((each, v) for s, each, v in self._points if s == size) for size in self._sizes]

    def at(self, size: float, each: float) -> Estimate:
        """The value of ``size`` units that have ``each`` to do."""
        sizes = self._sizes
        if len(sizes) == 1:  # in proportion: nothing else is known
            estimate = self._lines[0].at(each)
            beyond = estimate.beyond or abs(size - sizes[0]) > TOLERANCE * sizes[0]
            return Estimate(estimate.value * size / sizes[0], beyond)
        low = _below(size, sizes)
        near = [line.at(each) for line in self._lines[low : low + 2]]
        places = sizes[low : low + 2]
        value = _between(size, places, [estimate.value for estimate in near])
        beyond = _is_beyond(size, sizes)
        for other, estimate in zip(reversed(places), near, strict=True):
            beyond |= estimate.beyond and size != other  # at the other point it has no weight
        return Estimate(value, beyond)


def _is_beyond(x: float, places: Sequence[float]) -> bool:
    return x < places[0] * (1 - TOLERANCE) or x > places[-1] * (1 + TOLERANCE)


def _below(x: float, places: Sequence[float]) -> int:
    """The first of the two places that ``x`` lies between, or is nearest to."""
    return min(max(bisect_left(places, x), 1), len(places) - 1) - 1


def _between(x: float, places: Sequence[float], values: Sequence[float]) -> float:
    (x0, x1), (y0, y1) = places, values
    nearest = y0 if abs(x - x0) < abs(x - x1) else y1
    return max(y0 + (y1 - y0) * (x - x0) / (x1 - x0), _LEAST * nearest)
