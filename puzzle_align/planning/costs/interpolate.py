"""Interpolation between measured points; values beyond them are flagged.

There are two variables: a size (tokens of a row, sequences of a batch) and the work per unit of it
(pairs per token, predictions per token, context). Along both, values are linear between
neighbouring points; beyond the last points they are extrapolated from the last two, never below a
quarter of the nearest value, and flagged.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import NamedTuple

TOLERANCE = 0.05  # relative distance from the measured points that is not flagged yet
_LEAST = 0.25


class Estimate(NamedTuple):
    """A value, and whether it is extrapolated."""

    value: float
    beyond: bool = False


class Line:
    """Values of one variable."""

    def __init__(self, points: Iterable[tuple[float, float]]) -> None:
        """``points``: one ``(variable, value)`` or more, in any order; duplicates are averaged."""
        values: dict[float, list[float]] = {}
        for x, value in points:
            values.setdefault(x, []).append(value)
        assert values, "nothing was measured"
        self._at = sorted(values)
        self._values = [fmean(values[x]) for x in self._at]

    def at(self, x: float) -> Estimate:
        """The value at ``x``; constant if there is a single point."""
        beyond = _is_beyond(x, self._at)
        if len(self._at) == 1:
            return Estimate(self._values[0], beyond)
        low = _below(x, self._at)
        return Estimate(_between(x, self._at[low : low + 2], self._values[low : low + 2]), beyond)

    @property
    def least_each(self) -> float:
        """Minimum over ``x > 0`` of the value at ``x`` divided by ``x``."""
        if len(self._at) == 1:
            return 0.0
        at, values = self._at, self._values
        first, last = (
            (values[n + 1] - values[n]) / (at[n + 1] - at[n]) for n in (0, len(at) - 2)
        )  # the slopes of extrapolation
        ratios = [last, *(y / x for x, y in zip(at, values, strict=True) if x > 0)]
        if first > 0:
            lowest = at[0] - (1 - _LEAST) * values[0] / first  # where _LEAST of it is reached
            ratios += [_LEAST * values[0] / lowest] if lowest > 0 else []
        return max(0.0, min(ratios))


class Sheet:
    """Values of a size and of the work per unit of it: ``(size, each, value)``."""

    def __init__(self, points: Sequence[tuple[float, float, float]]) -> None:
        self._sizes = sorted({size for size, _, _ in points})
        # By size: the values over the work per unit.
        self._lines = [Line((each, v) for s, each, v in points if s == at) for at in self._sizes]

    def at(self, size: float, each: float) -> Estimate:
        """The value of ``size`` units with work ``each``."""
        sizes = self._sizes
        if len(sizes) == 1:  # assumed to be in proportion to the size
            estimate = self._lines[0].at(each)
            beyond = estimate.beyond or abs(size - sizes[0]) > TOLERANCE * sizes[0]
            return Estimate(estimate.value * size / sizes[0], beyond)
        low = _below(size, sizes)
        near = [line.at(each) for line in self._lines[low : low + 2]]
        places = sizes[low : low + 2]
        value = _between(size, places, [estimate.value for estimate in near])
        beyond = _is_beyond(size, sizes)
        for other, estimate in zip(reversed(places), near, strict=True):
            beyond |= estimate.beyond and size != other  # at the other size it has no weight
        return Estimate(value, beyond)


def _is_beyond(x: float, places: Sequence[float]) -> bool:
    return x < places[0] * (1 - TOLERANCE) or x > places[-1] * (1 + TOLERANCE)


def _below(x: float, places: Sequence[float]) -> int:
    """Index of the first of the two places around ``x``, or nearest to it."""
    return min(max(bisect_left(places, x), 1), len(places) - 1) - 1


def _between(x: float, places: Sequence[float], values: Sequence[float]) -> float:
    (x0, x1), (y0, y1) = places, values
    nearest = y0 if abs(x - x0) < abs(x - x1) else y1
    return max(y0 + (y1 - y0) * (x - x0) / (x1 - x0), _LEAST * nearest)
