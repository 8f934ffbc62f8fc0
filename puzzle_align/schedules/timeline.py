"""Times of every rank's compute actions, predicted or measured."""

from dataclasses import dataclass
from typing import NamedTuple

from puzzle_align.schedules.actions import Action


class Span(NamedTuple):
    """One compute action from ``start`` to ``end``."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """The compute actions of every pipeline rank, in order of time; 0 is when the first list began.

    Seconds, unless the costs that a prediction was made with are in another unit.
    """

    ranks: tuple[tuple[Span, ...], ...]

    @property
    def makespan(self) -> float:
        """Time at which the last rank has finished; 0 without any action."""
        return max((spans[-1].end for spans in self.ranks if spans), default=0.0)

    def busy(self, rank: int) -> float:
        """Time that a rank spends in actions."""
        return sum(span.end - span.start for span in self.ranks[rank])

    def idle(self, rank: int) -> float:
        """Time up to the makespan that a rank spends idle."""
        return self.makespan - self.busy(rank)

    def then(self, other: "Timeline") -> "Timeline":
        """This timeline followed by the other, after a barrier (an optimizer step)."""
        start = self.makespan
        return Timeline(
            tuple(
                mine + tuple(Span(s.action, s.start + start, s.end + start) for s in theirs)
                for mine, theirs in zip(self.ranks, other.ranks, strict=True)
            )
        )
