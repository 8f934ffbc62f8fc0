"""Timelines in the Chrome trace format, which https://ui.perfetto.dev opens.

A panel is a process, a pipeline rank a thread, a compute action a complete event ("ph": "X").
Numbers of processes and threads start at 1: to Perfetto, 0 is the kernel's idle task.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from puzzle_align.planning.picture.panel import Panel

MICROSECONDS = 1e6  # the format's unit


def save_trace(panels: Sequence[Panel], path: Path) -> None:
    """Write the panels side by side into one file (folders are made as needed)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    trace = {"traceEvents": trace_events(panels), "displayTimeUnit": "ms"}
    path.write_text(json.dumps(trace), encoding="utf-8")


def trace_events(panels: Sequence[Panel]) -> list[dict[str, Any]]:
    """The events of all panels: first the names of their tracks, then the actions."""
    numbered = list(enumerate(panels, start=1))
    names = [event for pid, panel in numbered for event in _names(pid, panel)]
    return names + [event for pid, panel in numbered for event in _actions(pid, panel)]


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
            # To the nanosecond, so that one action never seems to reach into the next.
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
