"""The page of ``puzzle-align report``: its numbers are the files', and its texts are escaped."""

import json
import re
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from puzzle_align.commands import report
from puzzle_align.commands.report.curves import MOST_POINTS, Curve, Point, chart, thinned, ticks
from puzzle_align.commands.report.page import make_page, write_page
from puzzle_align.commands.report.runs import read_runs
from puzzle_align.telemetry import Sample
from puzzle_align.telemetry.sinks import JsonlSink
from tests.command import main
from tests.refusals import closed, refusal

HOSTILE = "</script><img src=x onerror=\"document.title='owned'\">&amp;'"


class Parsed(HTMLParser):
    """A page's elements with their attributes, the cells of its tables' rows, and all its text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.rows: list[list[str]] = []
        self.text = ""
        self._in_cell = False
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._in_cell |= tag in ("td", "th")
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        self._in_cell &= tag not in ("td", "th")

    def handle_data(self, data: str) -> None:
        self.text += data
        if self._in_cell:
            self.rows[-1][-1] += data

    def row(self, name: str) -> list[str]:
        (row,) = (row[1:] for row in self.rows if row and row[0] == name)
        return row


def run_of(folder: Path, records: Sequence[dict], samples: Sequence[Sample] = ()) -> Path:
    sink = JsonlSink(folder / "metrics.jsonl", None)
    for record in records:
        sink.write(record["step"], {name: v for name, v in record.items() if name != "step"})
    sink.write_samples(1, samples)
    return folder


def page_of(*folders: Path) -> Parsed:
    return Parsed(make_page(read_runs(folders)))


LOSSES = [{"step": 1, "loss": 3.0}, {"step": 2, "loss": 1.0}, {"step": 4, "loss": 2.0}]


def test_a_curve_has_the_points_of_the_file_and_is_drawn_at_them(tmp_path):
    page = page_of(run_of(tmp_path / "a", [{"step": 1, "eval_loss": 2.5}, *LOSSES]))
    train, held_out = [attributes for name, attributes in page.elements if name == "path"]
    assert train["data-points"] == "1:3.0 2:1.0 4:2.0"
    assert held_out["data-points"] == "1:2.5"
    # Steps 1 to 4 on x from 50 to 350; values 0.92 to 3.08 (4% margins) on y from 168 up to 8.
    assert train["d"] == "M50.0 13.9L150.0 162.1L350.0 88.0"
    assert "last 2eval 2.5" in page.text


def test_only_the_peak_of_memory_is_in_gib(tmp_path):
    record = {"step": 1, "peak_memory": 3 * 2**30, "rewards/memory_reward/mean": 7.0}
    page = page_of(run_of(tmp_path, [record]))
    drawn = {a["data-points"] for name, a in page.elements if name == "path"}
    assert drawn == {"1:3.0", "1:7.0"}
    assert "peak_memory (GiB)" in page.text and "memory_reward/mean (GiB)" not in page.text


def test_a_value_that_is_not_finite_breaks_the_curve(tmp_path):
    values = [1.0, 2.0, float("nan"), 3.0, float("inf")]
    records = [{"step": n, "loss": value} for n, value in enumerate(values, start=1)]
    page = page_of(run_of(tmp_path, records))
    (path,) = [attributes for name, attributes in page.elements if name == "path"]
    assert path["data-points"] == "1:1.0 2:2.0 4:3.0"
    assert re.sub(r"[\d. ]+", "", str(path["d"])) == "MLM"
    assert "not finite" in page.text


def test_ticks_are_round_and_in_the_range():
    assert ticks(0.92, 3.08, 4) == [1.0, 2.0, 3.0]
    assert ticks(-0.03, 0.11, 4) == [0.0, 0.05, 0.1]
    assert ticks(0.0, 40.0, 5) == [0.0, 10.0, 20.0, 30.0, 40.0]


@pytest.mark.parametrize("values", [(5.0, 5.0), (0.0, 0.0), (1e15, 1e15 + 1), (-1e300, 1e299)])
def test_any_range_of_values_has_labels_that_differ(values):
    points = list(enumerate(values, start=1))
    page = Parsed(chart("m", [Curve(0, "", points, False)]))
    drawn = [dict(attributes) for name, attributes in page.elements if name == "path"]
    assert re.fullmatch(r"M50\.0 [\d.]+L350\.0 [\d.]+", str(drawn[0]["d"]))
    labels = re.findall(r'class="left">([^<]+)<', chart("m", [Curve(0, "", points, False)]))
    assert len({*labels}) == len(labels) >= 2


def test_a_thinned_curve_keeps_peaks_and_the_last_point():
    points: list[Point] = [(step, 0.001 * step) for step in range(1, 10_001)]
    points[1234], points[7000] = (1235, 99.0), (7001, None)
    kept = thinned(points)
    assert len(kept) <= MOST_POINTS + 2
    assert {(1235, 99.0), (7001, None), (1, 0.001), (10_000, 10.0)} <= {*kept}
    assert [step for step, _ in kept] == sorted({step for step, _ in kept})
    assert thinned(points[:MOST_POINTS]) == points[:MOST_POINTS]


def test_a_run_in_progress_is_shown_without_its_torn_line(tmp_path):
    folder = run_of(tmp_path / "a", LOSSES)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "loss": 0.')
    page = page_of(folder)
    assert page.row("steps") == ["4"]
    assert page.row("resumed from") == ["never resumed"]
    (folder / "metrics.jsonl").write_text("")
    assert page_of(folder).row("steps") == ["0"]


def test_wrong_folders_are_one_line(tmp_path, capsys):
    for path in (tmp_path, tmp_path / "none"):
        assert main(["report", str(path)]) == 2
        no_run = "no metrics.jsonl there; name the output_dir of a job that has begun to train"
        assert capsys.readouterr().err == f"error: {path}: {no_run}\n"
    folder = run_of(tmp_path / "a", LOSSES)
    assert refusal(lambda: read_runs([folder, tmp_path / "b/../a"])) == (
        "a RUN is named twice: name it once"
    )
    for line in ("[" * 5000, "{}", '{"step": true'):
        (folder / "metrics.jsonl").write_text(f"{line}\n" + '{"step": 2}\n')
        assert "metrics.jsonl:1: not a record" in refusal(lambda: read_runs([folder]))


def test_the_page_is_written_where_it_says(tmp_path, capsys):
    folder = run_of(tmp_path / "a", LOSSES)
    assert main(["report", str(folder)]) == 0
    assert capsys.readouterr().out == f"wrote {folder / 'report.html'}\n"
    assert "loss" in (folder / "report.html").read_text()
    assert main(["report", str(folder), "--output", str(tmp_path)]) == 2
    assert f"--output: {tmp_path} cannot be written" in capsys.readouterr().err


def test_runs_lie_over_each_other(tmp_path):
    one = run_of(tmp_path / "x/out", LOSSES)
    other = run_of(tmp_path / "y/out", [{"step": 3, "loss": 7.0, "kl": 0.5}])
    runs = read_runs([one, other])
    assert [run.name for run in runs] == ["x/out", "y/out"]
    page = make_page(runs)
    (figure,) = re.findall(r"<figure[^>]*><figcaption>loss<.*?</figure>", page)
    drawn = re.findall(r'<g class="(run\d)"><path d="([^"]*)" data-points="([^"]*)"', figure)
    assert [(run, points) for run, _, points in drawn] == [
        ("run0", "1:3.0 2:1.0 4:2.0"),
        ("run1", "3:7.0"),
    ]
    # One scale for both: 7.0 is the highest value, 6.0 above the lowest, with margins of 0.24.
    assert drawn[1][1] == f"M250.0 {168 - 6.24 / 6.48 * 160:.1f}"
    assert len(re.findall('id="show[01]"', page)) == 2


def test_times_are_medians_after_the_first_steps_or_of_the_plan(tmp_path):
    seconds = [9.0, 9.0, 1.0, 3.0, 2.0]
    records = [
        {"step": n, "time/learn": s / 2, "step_time": s} for n, s in enumerate(seconds, start=1)
    ]
    folder = run_of(tmp_path, records)
    page = page_of(folder)
    assert page.row("learn") == ["–", "1.000 s", "–", ""]
    assert page.row("iteration") == ["–", "2.000 s", "–", ""]
    times = {"learn": {"predicted": 4.0, "measured": 3.0}, "eval": {"predicted": 1.0}}
    compared = {"times": times, "memory": {"0": {"predicted": 2**31, "measured": 2**30}}}
    (folder / "plan_report.json").write_text(json.dumps(compared))
    page = page_of(folder)
    assert page.row("learn") == ["4.000 s", "3.000 s", "0.75", ""]
    assert page.row("eval") == ["1.000 s", "–", "–", ""]
    assert page.row("memory, ranks 0") == ["2.0 GiB", "1.0 GiB", "0.50", ""]
    widths = [a["style"] for name, a in page.elements if name == "hr"]
    assert widths == ["width:100.0%", "width:75.0%", "width:25.0%"]


def test_a_resumed_run_says_from_where(tmp_path):
    run_of(tmp_path, LOSSES)
    JsonlSink(tmp_path / "metrics.jsonl", 2)
    JsonlSink(tmp_path / "metrics.jsonl", 1)
    assert page_of(tmp_path).row("resumed from") == ["step 2, step 1"]
    JsonlSink(tmp_path / "metrics.jsonl", None)
    assert page_of(tmp_path).row("resumed from") == ["never resumed"]


def test_configs_are_shown_and_compared(tmp_path):
    one, other = (run_of(tmp_path / name, LOSSES) for name in "ab")
    shared = "stage: dpo\nmax_steps: 9\nactor: {model: {path: /models/m}}\n"
    (one / "config.yaml").write_text(f"{shared}dpo: {{beta: 0.1}}\n")
    by_epochs = shared.replace("9", "-1")
    (other / "config.yaml").write_text(f"{by_epochs}dpo: {{beta: 0.5, loss_type: [ipo]}}\n")
    (other / "checkpoints/step_00000004").mkdir(parents=True)
    page = page_of(one, other)
    assert page.row("steps") == ["4 of 9", "4"]
    assert page.row("began from") == ["actor: /models/m"] * 2
    assert page.row("checkpoints") == ["none in this folder", "step_00000004"]
    keys = [row for row in page.rows if row[0].startswith(("dpo.", "actor."))]
    differing = [["dpo.beta", "0.1", "0.5"], ["dpo.loss_type", "null", '["ipo"]']]
    assert keys == [*differing, ["actor.model.path", *["/models/m"] * 2], *differing]


def test_other_files_that_cannot_be_read_are_named(tmp_path):
    folder = run_of(tmp_path, LOSSES)
    (folder / "config.yaml").write_text("stage: [")
    (folder / "plan_report.json").write_text("{")
    (folder / "samples.jsonl").write_text("no\nno\n")
    (problems,) = page_of(folder).row("could not be read")
    for name in (
        "config.yaml:1: not valid YAML",
        "plan_report.json is not JSON",
        "samples.jsonl:1",
    ):
        assert name in problems


def test_a_closed_folder_of_checkpoints_is_named():
    with TemporaryDirectory() as name:  # others cannot enter tmp_path
        folder = run_of(Path(name), LOSSES)
        (folder / "checkpoints").mkdir()
        folder.chmod(0o755)
        with closed(folder / "checkpoints"):
            (problem,) = page_of(folder).row("could not be read")
    assert f"{name}/checkpoints cannot be read (checkpoints: Permission denied)" in problem


def test_traced_steps_are_shown_as_pictures_or_texts(tmp_path):
    folder = run_of(tmp_path, LOSSES)
    (folder / "trace").mkdir()
    for name in ("step_3.txt", "step_10.txt", "step_10.png"):
        (folder / "trace" / name).write_bytes(b"a<b")
    page = make_page(read_runs([folder]))
    latest, earlier = re.findall(r"<details[^>]*><summary>step_.*?</details>", page)
    assert latest.startswith('<details open="">') and "data:image/png;base64,YTxi" in latest
    assert earlier.startswith("<details><summary>step_3<") and "<pre>a&lt;b</pre>" in earlier


def test_a_strangers_texts_are_texts(tmp_path):
    sample = Sample(f"a\x07{HOSTILE}", "half a pair: \ud800", 0.5, {HOSTILE: [HOSTILE]})
    folder = run_of(tmp_path / "x<b>", [{"step": 1, HOSTILE: 1.0, "loss": 1e999}], [sample])
    (folder / "config.yaml").write_text(json.dumps({HOSTILE: HOSTILE}))
    (folder / "plan_report.json").write_text(json.dumps({"times": {HOSTILE: {"measured": 1}}}))
    write_page([folder], tmp_path / "page.html")
    page = Parsed((tmp_path / "page.html").read_text(encoding="utf-8"))
    names = [name for name, _ in page.elements]
    assert names.count("script") == 1 and "img" not in names
    assert not [a for _, a in page.elements if any(name.startswith("on") for name in a)]
    texts = [f"a\\x07{HOSTILE}", "half a pair: ?", json.dumps([HOSTILE])]
    assert ["step", "score", "prompt", "response", HOSTILE] in page.rows
    assert ["1", "0.5", *texts] in page.rows
    assert [HOSTILE, HOSTILE] in page.rows  # the config
    assert [HOSTILE, "–", "1.000 s", "–", ""] in page.rows
    assert "puzzle-align: x<b>" in page.text


def _luminance(colour: str) -> float:
    """Relative luminance of WCAG 2."""
    digits = colour[1:] if len(colour) == 7 else "".join(2 * digit for digit in colour[1:])
    parts = [int(digits[at : at + 2], 16) / 255 for at in (0, 2, 4)]
    linear = [p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("scheme", [0, 1])
def test_colours_stand_out_from_the_paper(scheme):
    style = Path(report.__file__).with_name("page.css").read_text()
    block = style.split(":root {")[1 + scheme].split("}")[0]
    colours = dict(re.findall(r"--(\w+): (#\w+);", block))
    assert len(colours) == 11
    for name in ("ink", "faint", *(f"colour{n}" for n in range(6))):
        for ground in ("paper", "panel"):
            one, other = sorted((_luminance(colours[name]), _luminance(colours[ground])))
            assert (other + 0.05) / (one + 0.05) >= 4.0, (name, ground)
