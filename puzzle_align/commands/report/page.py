"""The page: one HTML file without network, readable without its script.

A stranger's files run no code in it: ``html`` escapes every text, and by the page's policy a
browser runs no script but the page's own, whose checksum the policy has, and loads nothing.
"""

import base64
import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from puzzle_align.commands.report.curves import Curve, chart
from puzzle_align.commands.report.html import Html, element, joined
from puzzle_align.commands.report.runs import Compared, Run, number, read_runs
from puzzle_align.commands.summary import save_file
from puzzle_align.config.roles import ROLES
from puzzle_align.telemetry.sinks import EVAL_PREFIX
from puzzle_align.telemetry.text import STEP_FIELDS, num_bytes

GIB = 2**30
NUM_COLOURS = 6  # of runs, in page.css
MOST_SAMPLES, MOST_TEXT = 500, 4000  # samples shown of a run, and characters of a text
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{}'"
_MEMORY = "peak_memory"
_SPEED = ("step_time", "fill", "mfu", _MEMORY)  # with time/NAME and UNIT_per_second


def write_page(folders: Sequence[Path], output: Path) -> None:
    """Write the page of the runs in ``folders``; ValueError, one line, if that is impossible."""
    # A stranger's text may hold half of a surrogate pair, which is no UTF-8.
    page = make_page(read_runs(folders)).encode("utf-8", "replace")
    save_file("--output", output, lambda path: path.write_bytes(page))


def make_page(runs: Sequence[Run]) -> str:
    """The page's text."""
    here = Path(__file__)
    style, script = (here.with_suffix(end).read_text(encoding="utf-8") for end in (".css", ".js"))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    for n in range(len(runs)):
        style += f".run{n}{{--run:var(--colour{n % NUM_COLOURS})}}"
        style += f"body:has(#show{n}:not(:checked)) .run{n}:not(label){{display:none}}"
    names = ", ".join(run.name for run in runs)
    head = (
        Html('<meta charset="utf-8"><meta http-equiv="Content-Security-Policy"'),
        Html(f' content="{_POLICY.format(digest)}">'),
        Html('<meta name="viewport" content="width=device-width, initial-scale=1">'),
        element("title", f"puzzle-align: {names}"),
        element("style", Html(style)),
    )
    sections = joined(*_sections(runs), element("script", Html(script)))
    body = element("body", element("h1", names), sections)
    return f'<!doctype html>\n<html lang="en">{element("head", *head)}{body}</html>\n'


def _sections(runs: Sequence[Run]) -> Iterator[Html]:
    if len(runs) > 1:
        boxes = [Html(f'<input type="checkbox" id="show{n}" checked>') for n in range(len(runs))]
        labels = (
            element("label", boxes[n], element("i"), run.name, class_=f"run{n}")
            for n, run in enumerate(runs)
        )
        yield element("form", *labels, class_="runs")
    facts = [dict(_facts(run)) for run in runs]
    names = dict.fromkeys(chain.from_iterable(facts))
    yield _table(runs, "", [[name, *(each.get(name, "") for each in facts)] for name in names])
    yield from _curves(runs)
    yield from _by_run("Time and memory", runs, _times)
    yield from _by_run("Traced schedule", runs, _schedules)
    yield from _samples(runs)
    keys = dict.fromkeys(key for run in runs for key in run.settings)
    rows = [[key, *(_written(run.settings.get(key)) for run in runs)] for key in keys]
    yield element("h2", "Config")
    if len(runs) > 1:
        yield element("p", "Keys that differ:", class_="note")
        yield _table(runs, "key", [row for row in rows if len({*row[1:]}) > 1])
    yield element("details", element("summary", "All keys"), _table(runs, "key", rows))


def _by_run(title: str, runs: Sequence[Run], show: Callable[[Run], Html]) -> Iterator[Html]:
    """A section with a part of each run that has one."""
    parts = {n: part for n, run in enumerate(runs) if (part := show(run))}
    if parts:
        yield element("h2", title)
    for n, part in parts.items():
        name = [element("h3", runs[n].name)] if len(runs) > 1 else []
        yield element("section", *name, part, class_=f"run{n}")


def _table(runs: Sequence[Run], corner: str, rows: Sequence[Sequence[str]]) -> Html:
    """A table with a column for each run."""
    return _framed([corner, *(run.name for run in runs)], [_row(row) for row in rows])


def _row(cells: Sequence[str]) -> Html:
    name, *values = cells
    return element("tr", element("th", name, scope="row"), *(element("td", v) for v in values))


def _framed(head: Sequence[str], rows: Sequence[Html], **attributes: object) -> Html:
    """A table in a frame in which it scrolls."""
    names = element("tr", *(element("th", name, scope="col") for name in head))
    table = element("table", element("thead", names), element("tbody", *rows), **attributes)
    return element("div", table, class_="wide")


def _facts(run: Run) -> Iterator[tuple[str, str]]:
    settings, step = run.settings, max((record["step"] for record in run.records), default=0)
    yield "stage", str(settings.get("stage", "unknown"))
    planned = number(settings.get("max_steps")) or 0  # -1: by epochs
    yield "steps", f"{step} of {planned:.0f}" if planned > 0 else str(step)
    yield "last written", time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(run.last_written))
    paths = {role: settings.get(f"{role}.model.path") for role in ROLES}
    began = [f"{role}: {path}" for role, path in paths.items() if path]
    yield "began from", "\n".join(began) or ("random weights" if settings else "unknown")
    yield "resumed from", ", ".join(f"step {step}" for step in run.resumed) or "never resumed"
    yield "checkpoints", "\n".join(run.checkpoints) or "none in this folder"
    if run.problems:
        yield "could not be read", "\n".join(run.problems)


def _curves(runs: Sequence[Run]) -> Iterator[Html]:
    """Charts of all metrics: of learning, of speed and memory, and the others folded."""
    curves: dict[str, list[Curve]] = {}
    for n, run in enumerate(runs):
        for name, curve in _curves_of(n, run, several=len(runs) > 1):
            curves.setdefault(name, []).append(curve)
    learning = [name for name, _, _ in STEP_FIELDS if name in curves]
    speed = [
        name
        for name in curves
        if name in _SPEED or name.startswith("time/") or name.endswith("_per_second")
    ]
    others = sorted(curves.keys() - {*learning, *speed})
    yield element("h2", "Curves")
    if any(curve.is_eval for each in curves.values() for curve in each):
        yield element("p", "Lines with dots are of held-out data.", class_="note")
    groups = {"Learning": learning, "Speed, fill and memory": speed, "All other metrics": others}
    for title, names in groups.items():
        charts = (chart(f"{n} (GiB)" if n == _MEMORY else n, curves[n]) for n in names)
        inner = element("summary", title), element("div", *charts, class_="charts")
        is_open = {} if names is others else {"open": ""}
        yield element("details", *inner, **is_open) if names else Html()


def _curves_of(n: int, run: Run, *, several: bool) -> Iterator[tuple[str, Curve]]:
    """A run's curves by metric, held-out data's after training's."""
    points: dict[str, list[tuple[int, float | None]]] = {}
    for record in run.records:
        for name in record.keys() - {"step"}:
            value, scale = number(record[name]), GIB if name == _MEMORY else 1
            point = record["step"], None if value is None else value / scale
            points.setdefault(name, []).append(point)
    for name in sorted(points, key=lambda name: (name.startswith(EVAL_PREFIX), name)):
        is_eval = name.startswith(EVAL_PREFIX)
        label = " ".join([run.name] * several + ["eval"] * is_eval)
        yield name.removeprefix(EVAL_PREFIX), Curve(n, label, points[name], is_eval)


def _times(run: Run) -> Html:
    """Table of predicted and measured seconds by phase, with bars, and of memory."""
    note = "Medians of steps, beside the prediction of the plan file."
    if all(predicted is None for predicted, _ in run.times.values()):
        note = "Medians of logged steps. A run with --plan shows its prediction at its end."
    longest = max((value or 0.0 for pair in run.times.values() for value in pair), default=0.0)
    rows = [_compared(name, pair, "{:.3f} s".format, longest) for name, pair in run.times.items()]
    for ranks, pair in run.memory.items():
        rows.append(_compared(f"memory, ranks {ranks}", pair, num_bytes))
    head = ["", "predicted", "measured", "ratio", ""]
    table = _framed(head, [_row(row) for row in rows], class_="times")
    return joined(element("p", note, class_="note"), table) if rows else Html()


def _compared(
    name: str, pair: Compared, form: Callable[[float], str], longest: float = 0.0
) -> list[str]:
    bars = [
        element("hr", class_=kind, style=f"width:{100 * value / longest:.1f}%")
        for kind, value in zip(("predicted", "measured"), pair, strict=True)
        if value is not None and longest > 0
    ]
    predicted, measured = pair
    ratio = f"{measured / predicted:.2f}" if predicted and measured is not None else "–"
    return [name, *("–" if value is None else form(value) for value in pair), ratio, joined(*bars)]


def _schedules(run: Run) -> Html:
    """Pictures of the traced steps, else their texts: the last one open, the others folded."""
    parts = []
    for path in reversed(run.schedules):
        data = run.attempt(path, Path.read_bytes, b"")
        content = element("pre", data.decode("utf-8", "replace"))
        if path.suffix == ".png":
            source = f"data:image/png;base64,{base64.b64encode(data).decode()}"
            content = element("img", alt=f"{path.stem}, predicted and measured", src=source)
        inner = element("summary", path.stem), element("div", content, class_="wide")
        parts.append(element("details", *inner, **({} if parts else {"open": ""})))
    return joined(*parts)


def _samples(runs: Sequence[Run]) -> Iterator[Html]:
    """Table of the last samples of each run, which the page's script sorts and filters."""
    rows = [
        (n, ({"run": run.name} if len(runs) > 1 else {}) | {"step": 0, "score": None} | sample)
        for n, run in enumerate(runs)
        for sample in run.samples[-MOST_SAMPLES:]
    ]
    names = list(dict.fromkeys(name for _, sample in rows for name in sample))
    lines = [
        element("tr", *(_cell(sample.get(name)) for name in names), class_=f"run{n}")
        for n, sample in rows
    ]
    if rows:
        yield element("h2", "Samples and their rewards")
        yield _framed(names, lines, id="samples")


def _cell(value: Any) -> Html:
    if (as_number := number(value)) is not None:
        return element("td", f"{as_number:.4g}", data_value=repr(as_number))
    text = "" if value is None else _written(value)
    cut = f"… ({len(text)} characters)" if len(text) > MOST_TEXT else ""
    return element("td", element("div", text[:MOST_TEXT] + cut) if len(text) > 20 else text)


def _written(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
