"""The page of ``puzzle-align report`` in headless Chromium: narrow and wide, light and dark."""

import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path

import pytest

from puzzle_align.commands.report.page import write_page
from puzzle_align.telemetry import Sample
from puzzle_align.telemetry.sinks import JsonlSink

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: apt-get install chromium")

HOSTILE = "</script><img src=x onerror=\"document.title='owned'\">"
SCORES = (0.5, -2.0, 10.0, float("nan"), 9.0)
# A window is at least 500 pixels wide, a frame may be narrower. The frames' own policy holds in
# them; the script around them may look in, as the files' origins are made one.
FRAMES = """<body><iframe src="page.html" width="360" height="800"></iframe>
<iframe src="page.html" width="1400" height="800"></iframe>
<iframe src="page.html#sort=-score&filter=good" width="800" height="800"></iframe>
<script>
onload = () => {
  const seen = [...document.querySelectorAll("iframe")].map(look);
  document.body.replaceChildren(JSON.stringify(seen));
};
function look(frame) {
  const inner = frame.contentWindow, page = frame.contentDocument;
  const column = (name) => {
    const heads = [...page.querySelectorAll("#samples th")].map((head) => head.textContent);
    return [...page.querySelectorAll("#samples tbody tr")].filter((row) => row.offsetHeight > 0)
      .map((row) => row.cells[heads.indexOf(name)].textContent);
  };
  const click = (name) => [...page.querySelectorAll("#samples th button")]
    .find((button) => button.textContent === name).click();
  const scroller = page.querySelector("#samples").parentElement;
  const seen = {
    width: inner.innerWidth, needed: page.documentElement.scrollWidth, title: page.title,
    table: [scroller.clientWidth, scroller.scrollWidth], images: page.images.length,
    paper: inner.getComputedStyle(page.body).backgroundColor,
    opened: column("score"), count: page.querySelector("output").textContent,
  };
  const field = page.querySelector("input[type=search]");
  const filter = (text) => { field.value = text; field.dispatchEvent(new inner.Event("input")); };
  filter("");
  click("score");
  seen.ascending = column("score");
  click("score");
  seen.descending = column("score");
  click("prompt");
  seen.prompts = column("prompt");
  filter("GOOD run_b");
  seen.filtered = column("prompt");
  const svg = page.querySelector(".chart svg"), box = svg.getBoundingClientRect();
  const x = box.left + box.width * 200 / 360; // the middle of the axis: step 2 of 1 to 3
  svg.dispatchEvent(new inner.PointerEvent("pointermove", { clientX: x, clientY: box.top }));
  seen.pointed = page.querySelector(".chart .values").textContent;
  const curves = () => [...page.querySelectorAll(".chart g")]
    .map((curve) => curve.getBoundingClientRect().width > 0);
  seen.curves = curves();
  page.querySelector("#show0").click();
  seen.without_first = curves();
  return seen;
}
</script>
"""


def _write_runs(folder: Path) -> list[Path]:
    for name, factor in (("run_a", 1), ("run_b", 2)):
        sink = JsonlSink(folder / name / "metrics.jsonl", None)
        for step in (1, 2, 3):
            sink.write(step, {"loss": factor / step})
        texts = [f"{'good' if n % 2 else 'poor'} {name} {n} {'long ' * 40}" for n in range(5)]
        samples = [Sample(t, HOSTILE, s) for t, s in zip(texts, SCORES, strict=True)]
        sink.write_samples(3, samples)
    return [folder / "run_a", folder / "run_b"]


@pytest.fixture(scope="module", params=["light", "dark"])
def frames(request, tmp_path_factory) -> tuple[str, list[dict]]:
    folder = tmp_path_factory.mktemp(request.param)
    write_page(_write_runs(folder), folder / "page.html")
    (folder / "frames.html").write_text(FRAMES)
    done = subprocess.run(
        [
            str(CHROMIUM),
            "--headless",
            "--no-sandbox",  # which root cannot have
            "--disable-gpu",
            "--allow-file-access-from-files",
            f"--user-data-dir={folder / 'profile'}",
            "--window-size=1600,1000",
            f"--blink-settings=preferredColorScheme={int(request.param == 'light')}",
            "--dump-dom",
            f"file://{folder / 'frames.html'}",
        ],
        capture_output=True,
        text=True,
        timeout=60,
    )
    (body,) = re.findall("<body>(.*)</body>", done.stdout, re.DOTALL)
    return request.param, json.loads(unescape(body))


def test_the_page_fits_narrow_and_wide_screens(frames):
    narrow, wide, _ = frames[1]
    assert (narrow["width"], wide["width"]) == (360, 1400)
    for seen in (narrow, wide):
        assert seen["needed"] <= seen["width"]
    shown, whole = narrow["table"]
    assert shown <= 360 < whole, "the table would have nothing to scroll"


def test_the_page_is_light_or_dark_as_the_reader_likes(frames):
    paper = {"light": "rgb(255, 255, 255)", "dark": "rgb(20, 23, 27)"}[frames[0]]
    assert [seen["paper"] for seen in frames[1]] == [paper] * 3


def test_a_strangers_sample_runs_nothing(frames):
    for seen in frames[1]:
        assert (seen["title"], seen["images"]) == ("puzzle-align: run_a, run_b", 0)


def test_the_address_sorts_and_filters(frames):
    whole, _, asked = frames[1]
    assert whole["opened"] == ["0.5", "-2", "10", "", "9"] * 2
    assert whole["count"] == "10 of 10 samples"
    assert asked["opened"] == ["-2", "-2", "", ""]  # good are numbers 1 and 3 of both runs
    assert asked["count"] == "4 of 10 samples"


def test_heads_sort_and_the_field_filters(frames):
    for seen in frames[1]:
        ascending = ["-2", "-2", "0.5", "0.5", "9", "9", "10", "10"]
        assert seen["ascending"] == [*ascending, "", ""]
        assert seen["descending"] == [*reversed(ascending), "", ""]
        assert len(seen["prompts"]) == 10 and seen["prompts"] == sorted(seen["prompts"])
        assert [text[:12] for text in seen["filtered"]] == ["good run_b 1", "good run_b 3"]


def test_curves_are_read_and_hidden(frames):
    for seen in frames[1]:
        assert seen["pointed"] == "step 2run_a 0.5run_b 1"
        assert seen["curves"] == [True, True]
        assert seen["without_first"] == [False, True]
