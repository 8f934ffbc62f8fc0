"""Pictures of a timeline hold what the timeline holds: every action, when and where it ran."""

import json
import sys
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.image import imread

from puzzle_align.planning.picture import png
from puzzle_align.planning.picture.figures import DPI
from puzzle_align.planning.picture.panel import Panel, in_shares, save_trace, time_text
from puzzle_align.planning.picture.png import save_png
from puzzle_align.planning.picture.text import draw_text
from puzzle_align.schedules.actions import Kind
from puzzle_align.schedules.timeline import Span, Timeline
from tests.refusals import refusal
from tests.unit.schedule_csv import parse_action

MS = 1e-3


def _timeline(*ranks: str) -> Timeline:
    """From ranks written as ``action@start-end ...``, in milliseconds."""
    return Timeline(tuple(tuple(_span(text) for text in rank.split()) for rank in ranks))


def _span(text: str) -> Span:
    action, times = text.split("@")
    start, end = times.split("-")
    return Span(parse_action(action), float(start) * MS, float(end) * MS)


# Two pipeline ranks, two microbatches: the reference's forwards fill the policy's bubbles.
SHARED = _timeline(
    "actor:F0.0@0-2 actor:F1.0@2-4 reference:F0.0@4-6 actor:B0.0@8-12 actor:B1.0@14-18",
    "actor:F0.0@2-4 actor:B0.0@4-8 actor:F1.0@8-10 actor:B1.0@10-14 reference:F0.0@14-16",
)
SHORT = _timeline("actor:F0.0@0-2 actor:B0.0@4-8", "reference:F0.0@2-4")
PANELS = [Panel("shared", SHARED, marks=(8 * MS,)), Panel("short", SHORT)]
TEXT = """\
shared
P0 a0--a1--r0--....A0======....A1======
P1 ....a0--A0======a1--A1======r0--....
   |0              |8 ms         18 ms|
makespan 18 ms, idle P0 22.2% P1 22.2%

short
P0 a0--....A0======
P1 ....r0--........
   |0         8 ms|
makespan 8 ms, idle P0 25.0% P1 75.0%

a0-- actor forward  A0== actor backward  r0-- reference forward  .... idle
"""


def test_text_shows_every_action_and_the_idle_time() -> None:
    assert draw_text(PANELS, 39) == TEXT


def test_a_usual_forward_takes_a_whole_number_of_columns() -> None:
    assert draw_text(PANELS, 46) == TEXT  # 47 columns give a forward a fifth one
    rows = draw_text(PANELS, 21).splitlines()
    assert rows[1] == "P0 a0a1r0..A0==..A1=="
    assert rows[2] == "P1 ..a0A0==a1A1==r0.."


@pytest.mark.parametrize("width", [4, 5, 12, 30, 120])
def test_rows_fit_the_width_and_numbers_stand_where_they_fit(width: int) -> None:
    lines = draw_text(PANELS, width).splitlines()
    rows = [line for line in lines if line[:2] in ("P0", "P1")]
    assert len(rows) == 4 and max(map(len, rows)) <= width
    assert ("a0" in rows[0]) == (width > 20)
    warning = "A column is longer than a forward: not every action is seen."
    assert (lines[-1] == warning) == (width < 12)


def test_colours_replace_the_letters() -> None:
    shown = draw_text(PANELS, 39, colour=True).splitlines()[1]
    light, dark = "\033[38;5;16;48;5;117m", "\033[38;5;231;48;5;25m"
    boxes = [f"{light}0   ", f"{light}1   ", "\033[38;5;16;48;5;222m0   "]
    boxes += [f"....{dark}0       ", f"....{dark}1       "]
    assert shown == "P0 " + "".join(f"{box}\033[0m" for box in boxes)
    assert f"{light}0\033[0m" in draw_text(PANELS, 12, colour=True)  # one column holds a digit


def test_models_of_one_initial_get_letters_of_their_own() -> None:
    timeline = _timeline("reference:F0.0@0-1 reward:F0.0@1-2 r:F0.0@2-3")
    shown = draw_text([Panel("three", timeline)], 15)
    assert shown.startswith("three\nP0 e0--w0--r0--\n")
    assert "r0-- r forward  e0-- reference forward  w0-- reward forward" in shown


def test_nothing_to_show_is_no_error(tmp_path: Path) -> None:
    panels = [Panel("empty", Timeline(((), ())))]
    assert "makespan 0, idle P0 0.0% P1 0.0%" in draw_text(panels, 40)
    save_png(panels, tmp_path / "empty.png")
    save_trace(panels, tmp_path / "empty.json")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0"), (2.5e-6, "2.5 us"), (12.34e-3, "12.3 ms"), (0.9996, "1000 ms"), (123.4, "123 s")],
)
def test_times_read_well(seconds: float, text: str) -> None:
    assert time_text(seconds) == text


def test_the_png_has_a_row_a_rank_and_a_box_an_action(tmp_path: Path) -> None:
    save_png(PANELS, tmp_path / "new" / "schedule.png")
    bars, _ = _read(tmp_path / "new" / "schedule.png")
    ranks = [(panel, rank) for panel in PANELS for rank in (0, 1)]
    assert len(bars) == len(ranks)
    left, right = bars[0][0].start, bars[0][-1].end
    scale = (right - left) / SHARED.makespan  # pixels a second
    for bar, (panel, rank) in zip(bars, ranks, strict=True):
        boxes, spans = [run for run in bar if run.colour != png.IDLE], panel.timeline.ranks[rank]
        assert [run.colour for run in boxes] == [_colour(span) for span in spans]
        for run, span in zip(boxes, spans, strict=True):
            assert run.start - left == pytest.approx(span.start * scale, abs=2)
            assert run.end - left == pytest.approx(span.end * scale, abs=2)
        idle = sum(run.end - run.start for run in bar if run.colour == png.IDLE)
        assert idle == pytest.approx(panel.timeline.idle(rank) * scale, abs=8)
        assert bar[-1].end - left == pytest.approx(panel.timeline.makespan * scale, abs=2)


def test_the_png_has_numbers_in_its_boxes(tmp_path: Path) -> None:
    save_png(PANELS, tmp_path / "schedule.png")
    bars, image = _read(tmp_path / "schedule.png")
    for run in (run for bar in bars for run in bar):
        middle = (run.start + run.end) // 2
        inside = image[run.top + 4 : run.top + 28, middle - 6 : middle + 6].reshape(-1, 3)
        kept = (inside == _rgb(run.colour)).all(axis=1)
        assert kept.all() == (run.colour == png.IDLE)


def _long(num_microbatches: int) -> Timeline:
    """One rank with as many forwards and backwards in turns."""
    pairs = [
        f"actor:F{n}.0@{3 * n}-{3 * n + 1} actor:B{n}.0@{3 * n + 1}-{3 * n + 3}"
        for n in range(num_microbatches)
    ]
    return _timeline(" ".join(pairs))


@pytest.mark.parametrize(("num_microbatches", "num_rows"), [(12, 1), (58, 2), (88, 3), (600, 4)])
def test_a_long_panel_is_wrapped_into_rows_of_one_screen(
    tmp_path: Path, num_microbatches: int, num_rows: int
) -> None:
    panel = Panel("long", _long(num_microbatches))
    save_png([panel], tmp_path / "long.png")
    bars, image = _read(tmp_path / "long.png")
    assert image.shape[1] == 1920 and len(bars) == num_rows
    # Their boxes follow one another: together as long as the timeline.
    lengths = [bar[-1].end - bar[0].start for bar in bars]
    assert lengths == pytest.approx([png.INNER * DPI] * num_rows, abs=3)


@pytest.mark.parametrize("num_microbatches", [5, 40, 130, 1100])
def test_numbers_are_thinned_and_never_overlap(num_microbatches: int) -> None:
    (spans,) = _long(num_microbatches).ranks
    scale = png.INNER / spans[-1].end * min(png.MOST_ROWS, num_microbatches / 10)
    numbered = png._numbered(spans, scale)
    numbers = [span.action.microbatch for span in numbered]
    assert len(numbers) >= 5 and max(numbers) >= 0.9 * (num_microbatches - 1)
    gaps = np.diff([*dict.fromkeys(numbers)])
    assert len({*gaps.tolist()}) == 1, "every one, second, fourth, ..."
    for one, other in pairwise(numbered):
        widths = [len(str(span.action.microbatch)) * png.DIGIT for span in (one, other)]
        apart = (other.start + other.end - one.start - one.end) / 2 * scale
        assert apart >= sum(widths) / 2


def test_shares_stand_where_nobody_knows_the_seconds() -> None:
    first, second = in_shares(PANELS)
    assert first.timeline.makespan == 1 and second.timeline.makespan == pytest.approx(8 / 18)
    shown = draw_text([first, second], 39)
    assert shown == (
        TEXT.replace("|0 ", "|0%")
        .replace("18 ms|", " 100%|")
        .replace("|8 ms ", "|44%  ")
        .replace(" 8 ms|", "  44%|")
        .replace("makespan 18 ms", "makespan 100%")
        .replace("makespan 8 ms", "makespan 44%")
    )


def test_without_matplotlib_the_error_names_the_cure(tmp_path: Path, monkeypatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.setitem(sys.modules, name, None)
    line = refusal(lambda: save_png(PANELS, tmp_path / "schedule.png"))
    assert "pip install 'puzzle-align[plot]'" in line


def test_the_trace_has_an_event_an_action_on_a_track_a_rank(tmp_path: Path) -> None:
    save_trace(PANELS, tmp_path / "new" / "trace.json")
    events = json.loads((tmp_path / "new" / "trace.json").read_text())["traceEvents"]
    names = {
        (event["name"], event["pid"], event["tid"]): event["args"]["name"]
        for event in events
        if event["ph"] == "M"
    }
    assert names == {
        ("process_name", 1, 1): "shared",
        ("thread_name", 1, 1): "P0",
        ("thread_name", 1, 2): "P1",
        ("process_name", 2, 1): "short",
        ("thread_name", 2, 1): "P0",
        ("thread_name", 2, 2): "P1",
    }
    actions = [event for event in events if event["ph"] == "X"]
    assert [(e["pid"], e["tid"], e["name"], e["ts"], e["ts"] + e["dur"]) for e in actions] == [
        (pid, 1 + rank, str(s.action), pytest.approx(s.start * 1e6), pytest.approx(s.end * 1e6))
        for pid, panel in enumerate(PANELS, start=1)
        for rank, spans in enumerate(panel.timeline.ranks)
        for s in spans
    ]
    assert actions[3]["args"] == {"model": "actor", "kind": "backward", "microbatch": 0, "chunk": 0}


@dataclass(frozen=True)
class Run:
    """Pixels of one colour beside each other, near the upper edge of a bar."""

    colour: str
    start: int
    end: int
    top: int


def _read(path: Path) -> tuple[list[list[Run]], np.ndarray]:
    """A PNG's bars from top to bottom, each as its runs, and its pixels as bytes."""
    image = np.round(imread(path)[..., :3] * 255).astype(np.uint8)
    palette = [*(colour for pair in png.COLOURS for colour in pair), png.IDLE]
    colours = np.full(image.shape[:2], -1)
    for number, colour in enumerate(palette):
        colours[(image == _rgb(colour)).all(axis=2)] = number
    filled = (colours >= 0).mean(axis=1) > 0.3  # the legend's boxes are small
    tops = np.flatnonzero(np.diff(filled.astype(int), prepend=0) == 1)
    bars = []
    for top in tops:
        line = colours[top + 3]
        starts = np.flatnonzero(np.diff(line, prepend=-1))
        ends = [*starts[1:], len(line)]
        runs = (
            Run(palette[line[s]], int(s), int(e), int(top))
            for s, e in zip(starts, ends, strict=True)
            if line[s] >= 0
        )
        bars.append(list(runs))
    return bars, image


def _rgb(colour: str) -> np.ndarray:
    return np.round(np.array(to_rgb(colour)) * 255).astype(np.uint8)


def _colour(span: Span) -> str:
    light, dark = png.COLOURS[["actor", "reference"].index(span.action.model)]
    return light if span.action.kind is Kind.FORWARD else dark
