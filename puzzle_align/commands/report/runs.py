"""Read runs' folders for their page.

Invariants (the tests assert them):
- a run may be in progress: a last line that is not whole yet is left out;
- a folder that is no run, and damaged metrics, are one-line errors; another file that cannot be
  read is left out, and named among the run's ``problems``;
- files may be a stranger's: texts may hold anything, numbers are finite.
"""

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

from puzzle_align.config.saved import checkpoint_paths
from puzzle_align.config.yaml_tree import Tree
from puzzle_align.files.json_file import read_object
from puzzle_align.files.messages import reading, shown_path
from puzzle_align.telemetry.sinks import read_records

T = TypeVar("T")
Record = dict[str, Any]
Compared = tuple[float | None, float | None]  # predicted, measured
_MOST = 1e300  # of a number: no sum or difference of two is infinite
_WARM_UP = 2  # first steps of a run, which compile and allocate


@dataclass
class Run:
    """Content of a run's folder; ``name`` tells it from the other runs of the page."""

    name: str
    records: list[Record] = field(default_factory=list)
    samples: list[Record] = field(default_factory=list)
    resumed: list[int] = field(default_factory=list)  # steps that it was resumed from
    checkpoints: list[str] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)  # the config, by dotted key
    schedules: list[Path] = field(default_factory=list)  # texts and pictures of traced steps
    times: dict[str, Compared] = field(default_factory=dict)  # median seconds by phase
    memory: dict[str, Compared] = field(default_factory=dict)  # bytes by ranks
    last_written: float = 0.0  # time of the metrics file
    problems: list[str] = field(default_factory=list)

    def attempt(self, path: Path, read: Callable[[Path], T], otherwise: T) -> T:
        """Read a file, if it exists; note a one-line error as a problem."""
        try:
            with reading(path):
                return read(path) if path.exists() else otherwise
        except ValueError as error:
            self.problems.append(str(error))
            return otherwise


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """Read every run; ValueError, one line, for a folder that is none or damaged metrics."""
    places = [os.path.abspath(folder) for folder in folders]
    if len({*places}) < len(places):
        raise ValueError("a RUN is named twice: name it once")
    shared = os.path.commonpath([os.path.dirname(place) for place in places])
    return [_read_run(Path(place), os.path.relpath(place, shared)) for place in places]


def number(value: Any) -> float | None:
    """A record's value as a float; None for anything but a finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < _MOST:
        return None
    return float(value)


def _read_run(folder: Path, name: str) -> Run:
    run, metrics = Run(name), folder / "metrics.jsonl"
    with reading(folder):
        if not metrics.is_file():
            raise ValueError(
                f"{shown_path(folder)}: no metrics.jsonl there; name the output_dir of a job that"
                " has begun to train"
            )
        run.records, run.last_written = _lines(metrics), metrics.stat().st_mtime
    run.samples = run.attempt(folder / "samples.jsonl", _lines, [])
    resumes: list[Record] = run.attempt(folder / "resumes.jsonl", _lines, [])
    run.resumed = [record["step"] for record in resumes]
    paths: list[Path] = run.attempt(folder / "checkpoints", checkpoint_paths, [])
    run.checkpoints = [path.name for path in paths]
    run.settings = run.attempt(folder / "config.yaml", _read_config, {})
    texts = sorted(folder.glob("trace/*.txt"), key=lambda path: (len(path.name), path.name))
    run.schedules = [p if (p := text.with_suffix(".png")).is_file() else text for text in texts]
    cure = "the run writes it anew at its end"
    report = run.attempt(folder / "plan_report.json", lambda path: read_object(path, cure), {})
    run.times, run.memory = (_pairs(report.get(part)) for part in ("times", "memory"))
    run.times = run.times or dict(_measured(run.records))
    return run


def _lines(path: Path) -> list[Record]:
    records = read_records(path, sys.maxsize)[0]
    return [record for record in records if number(record["step"]) is not None]


def _read_config(path: Path) -> dict[str, Any]:
    tree = Tree()
    tree.read(path.read_text(encoding="utf-8", errors="replace"), str(path))
    return dict(_flat("", tree.data))


def _flat(prefix: str, values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, dict) and value:
            yield from _flat(f"{prefix}{name}.", value)
        else:
            yield f"{prefix}{name}", value


def _pairs(part: Any) -> dict[str, Compared]:
    """Predicted and measured values of a part of ``plan_report.json``."""
    pairs = part.items() if isinstance(part, dict) else ()
    return {
        name: (number(pair.get("predicted")), number(pair.get("measured")))
        for name, pair in pairs
        if isinstance(pair, dict)
    }


def _measured(records: Sequence[Record]) -> Iterator[tuple[str, Compared]]:
    """Medians of the logged steps after the first ones, if there are such, the whole step last."""
    timed = [record for record in records if "step_time" in record]
    timed = [record for record in timed if record["step"] > _WARM_UP] or timed
    names = dict.fromkeys(name for record in timed for name in record if name[:5] == "time/")
    for name in (*names, *["step_time"] * bool(timed)):
        seconds = [value for record in timed if (value := number(record.get(name))) is not None]
        if seconds:
            whole = name == "step_time"
            yield "iteration" if whole else name[5:], (None, median(seconds))
