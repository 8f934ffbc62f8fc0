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
    """Compute actions of every pipeline rank, in order of time; the first list begins at 0.

    Times are in seconds if measured, in the unit of the costs if predicted.
    """

    ranks: tuple[tuple[Span, ...], ...]

    @property
    def makespan(self) -> float:
        """Time at which the last rank is done; 0 without actions."""
        return max((spans[-1].end for spans in self.ranks if spans), default=0.0)

    def busy(self, rank: int) -> float:
        """Time that a rank spends in actions."""
        return sum(span.end - span.start for span in self.ranks[rank])

    def idle(self, rank: int) -> float:
        """Time up to the makespan that a rank spends idle."""
        return self.makespan - self.busy(rank)

    def idle_share(self, rank: int | None = None) -> float:
        """Idle share of the makespan on a rank; None: in the mean of all. 0 without actions."""
        ranks = range(len(self.ranks)) if rank is None else [rank]
        whole = self.makespan * len(ranks)
        return sum(map(self.idle, ranks)) / whole if whole else 0.0

    def scaled(self, factor: float) -> "Timeline":
        """This timeline with all times multiplied by ``factor``."""
        return Timeline(
            tuple(
                tuple(Span(s.action, s.start * factor, s.end * factor) for s in spans)
                for spans in self.ranks
            )
        )

    def then(self, other: "Timeline") -> "Timeline":
        """This timeline followed by the other, after a barrier (an optimizer step)."""
        start = self.makespan
        return Timeline(
            tuple(
                mine + tuple(Span(s.action, s.start + start, s.end + start) for s in theirs)
                for mine, theirs in zip(self.ranks, other.ranks, strict=True)
            )
        )
