"""The panels of every kind of picture: timelines under titles, and the words for their times."""

from collections.abc import Sequence
from dataclasses import dataclass

from puzzle_align.schedules.actions import Kind
from puzzle_align.schedules.timeline import Timeline


@dataclass(frozen=True)
class Panel:
    """One timeline, in seconds, under its title.

    ``marks`` are times to point out, such as ends of steps. ``labels`` name the lanes where they
    are other than pipeline ranks 0, 1, 2.
    """

    title: str
    timeline: Timeline
    marks: tuple[float, ...] = ()
    labels: tuple[str, ...] = ()

    @property
    def lanes(self) -> tuple[str, ...]:
        """The lanes' names."""
        return self.labels or tuple(f"P{rank}" for rank in range(len(self.timeline.ranks)))


def idle_share(timeline: Timeline, rank: int) -> float:
    """Part of the makespan that a pipeline rank spends in no action; 0 of an empty timeline."""
    makespan = timeline.makespan
    return timeline.idle(rank) / makespan if makespan else 0.0


def work_of(panels: Sequence[Panel]) -> dict[str, list[Kind]]:
    """The models of all panels and the kinds of their actions, in an order that never changes."""
    spans = (span for panel in panels for rank in panel.timeline.ranks for span in rank)
    pairs = {(span.action.model, span.action.kind) for span in spans}
    return {
        model: [kind for kind in (Kind.FORWARD, Kind.BACKWARD) if (model, kind) in pairs]
        for model in sorted({model for model, _ in pairs})
    }


def longest(panels: Sequence[Panel]) -> float:
    """Makespan of the longest timeline: panels share one scale."""
    return max((panel.timeline.makespan for panel in panels), default=0.0)


def time_unit(seconds: float) -> tuple[float, str]:
    """Unit in which a time reads well: its length in seconds, and its name."""
    for length, name in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= length:
            return length, name
    return 1e-6, "us"


def time_text(seconds: float) -> str:
    """``12.3 ms``: a time with three digits."""
    if seconds == 0:
        return "0"
    length, name = time_unit(seconds)
    value = seconds / length
    return f"{value:.0f} {name}" if value >= 100 else f"{value:.3g} {name}"
