"""Panels (timelines with titles) for all kinds of pictures, and their text of times.

``save_trace`` writes them in the Chrome trace format, which https://ui.perfetto.dev opens: a panel
is a process, a pipeline rank a thread, a compute action a complete event ("ph": "X"). Numbers of
processes and threads start at 1: to Perfetto, 0 is the kernel's idle task.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from puzzle_align.schedules.actions import Kind
from puzzle_align.schedules.timeline import Timeline


@dataclass(frozen=True)
class Panel:
    """One timeline, in seconds, under its title.

    ``marks`` are times to point out, such as ends of steps. ``labels`` name the lanes; empty: they
    are pipeline ranks 0, 1, 2. ``in_shares``: seconds are unknown; times are shares of the longest
    panel.
    """

    title: str
    timeline: Timeline
    marks: tuple[float, ...] = ()
    labels: tuple[str, ...] = ()
    in_shares: bool = False

    def time_text(self, time: float) -> str:
        """A time as text, or a share: ``12.3 ms``, ``45%``."""
        return f"{100 * time:.0f}%" if self.in_shares else time_text(time)

    @property
    def lanes(self) -> tuple[str, ...]:
        """Names of the lanes."""
        return self.labels or tuple(f"P{rank}" for rank in range(len(self.timeline.ranks)))


def work_of(panels: Sequence[Panel]) -> dict[str, list[Kind]]:
    """Models of all panels and the kinds of their actions, in a fixed order."""
    spans = (span for panel in panels for rank in panel.timeline.ranks for span in rank)
    pairs = {(span.action.model, span.action.kind) for span in spans}
    return {
        model: [kind for kind in (Kind.FORWARD, Kind.BACKWARD) if (model, kind) in pairs]
        for model in sorted({model for model, _ in pairs})
    }


def longest(panels: Sequence[Panel]) -> float:
    """Makespan of the longest timeline: panels share one scale."""
    return max((panel.timeline.makespan for panel in panels), default=0.0)


def in_shares(panels: Sequence[Panel]) -> list[Panel]:
    """The panels with times as shares of the longest one's makespan."""
    factor = 1 / (longest(panels) or 1.0)
    return [
        replace(
            panel,
            timeline=panel.timeline.scaled(factor),
            marks=tuple(mark * factor for mark in panel.marks),
            in_shares=True,
        )
        for panel in panels
    ]


def time_unit(seconds: float) -> tuple[float, str]:
    """A readable unit for a time: its length in seconds, and its name."""
    for length, name in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= length:
            return length, name
    return 1e-6, "us"


def time_text(seconds: float) -> str:
    """Format a time with three digits: ``12.3 ms``."""
    if seconds == 0:
        return "0"
    length, name = time_unit(seconds)
    value = seconds / length
    return f"{value:.0f} {name}" if value >= 100 else f"{value:.3g} {name}"


MICROSECONDS = 1e6  # the format's unit


def save_trace(panels: Sequence[Panel], path: Path) -> None:
    """Write the panels side by side into one file (folders are made as needed)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    numbered = list(enumerate(panels, start=1))
    events = [event for pid, panel in numbered for event in _names(pid, panel)]
    events += [event for pid, panel in numbered for event in _actions(pid, panel)]
    trace = {"traceEvents": events, "displayTimeUnit": "ms"}
    path.write_text(json.dumps(trace), encoding="utf-8")


def _names(pid: int, panel: Panel) -> Iterator[dict[str, Any]]:
    yield _named("process", pid, 1, panel.title)
    for rank, name in enumerate(panel.lanes):
        yield _named("thread", pid, 1 + rank, name)


def _named(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": f"{what}_name", "pid": pid, "tid": tid, "args": {"name": name}}


def _actions(pid: int, panel: Panel) -> Iterator[dict[str, Any]]:
    for rank, spans in enumerate(panel.timeline.ranks):
        for span in spans:
            action = span.action
            kind = action.kind.name.lower()
            # Rounded to the nanosecond, so that one action never overlaps the next.
            start, end = (round(time * MICROSECONDS, 3) for time in (span.start, span.end))
            yield {
                "ph": "X",
                "name": str(action),
                "cat": f"{action.model},{kind}",
                "pid": pid,
                "tid": 1 + rank,
                "ts": start,
                "dur": round(end - start, 3),
                "args": {
                    "model": action.model,
                    "kind": kind,
                    "microbatch": action.microbatch,
                    "chunk": action.chunk,
                },
            }
