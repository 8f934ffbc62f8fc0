"""Sinks: what a disk that fails says, and what reward functions logged beside the samples."""

import json
import math
import sys
from functools import partial

import numpy as np
import pytest

from puzzle_align.stages.rewards.functions import json_value
from puzzle_align.telemetry import Sample
from puzzle_align.telemetry.sinks import (
    JsonlSink,
    Sink,
    TensorBoardSink,
    WandbSink,
    read_records,
    samples_markdown,
)
from tests.refusals import refusal
from tests.unit.test_telemetry import _FakeWandb


@pytest.mark.parametrize("kind", ["metrics", "samples", "tensorboard"])
@pytest.mark.parametrize("fault", ["full", "deleted"])
def test_what_cannot_be_written_is_one_line_with_its_path(tmp_path, capfd, kind, fault):
    folder = tmp_path / "out"
    sink: Sink = JsonlSink(folder / "metrics.jsonl", None)
    path = folder / f"{kind}.jsonl"
    if kind == "tensorboard":
        pytest.importorskip("tensorboard")
        path = folder / kind
        sink = TensorBoardSink(path, None)
    if fault == "deleted":  # in one go: TensorBoard's thread may be writing
        folder.rename(tmp_path / "gone")
    else:
        full = tmp_path / "full"
        full.symlink_to("/dev/full")
        for file in path.iterdir() if kind == "tensorboard" else [path]:
            full.rename(file)
    write = partial(sink.write_samples, 2, [Sample("p", "r", 0.5)])
    if kind != "samples":
        write = partial(sink.write, 2, {"loss": 0.5})
    why = "No space left on device" if fault == "full" else "No such file or directory"
    assert refusal(write) == (
        f"{path} cannot be written ({why}): free space or mend the disk there, and run the same"
        " command again"
    )
    assert capfd.readouterr().err == ""


PLAIN = Sample("p", "", math.inf)
LOGGED = Sample("p", "r", 1.0, {"found": "8", "score": 3, "step": 9})


def test_names_of_our_own_columns_stay_ours(tmp_path):
    JsonlSink(tmp_path / "metrics.jsonl", None).write_samples(3, [LOGGED, PLAIN])
    first, last = map(json.loads, (tmp_path / "samples.jsonl").read_text().splitlines())
    assert first == {"step": 3, "prompt": "p", "response": "r", "score": 1.0, "found": "8"}
    assert last == {"step": 3, "prompt": "p", "response": "", "score": None}
    half = samples_markdown([Sample("p", "\ud83d", 1.0)])
    assert half.encode().decode().endswith("response:\n\n    \\ud83d")  # can be written
    assert samples_markdown([LOGGED]) == (
        "**score 1.0000**, prompt:\n\n    p\n\nresponse:\n\n    r\n\nfound:\n\n    8"
    )


def test_a_column_may_be_there_for_some_samples_alone(tmp_path, monkeypatch):
    fake = _FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    WandbSink("p", tmp_path, None, {}).write_samples(3, [PLAIN, LOGGED])
    columns = ["prompt", "response", "score", "found"]
    rows = [["p", "", math.inf, None], ["p", "r", 1.0, "8"]]
    assert fake.logged == [{"step": 3, "train/samples": {"columns": columns, "data": rows}}]


def test_a_column_may_have_values_of_several_types(tmp_path, monkeypatch):
    """A reward function's NaN is logged as text, beside numbers."""
    fake = _FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    samples = [Sample("p", "r", 1.0, {"length": value}) for value in (0.5, "nan", [3])]
    WandbSink("p", tmp_path, None, {}).write_samples(3, samples)
    rows = fake.logged[0]["train/samples"]["data"]
    assert rows == [["p", "r", 1.0, value] for value in (0.5, "nan", [3])]


@pytest.mark.parametrize(
    ("value", "kept"),
    [
        ({"a": [1, None]}, {"a": [1, None]}),
        (np.array([0.5]), [0.5]),
        (np.float32(0.5), 0.5),
        (math.nan, "nan"),
        ([1, math.inf], "[1, inf]"),
        (1j, "1j"),
    ],
)
def test_what_json_has_no_form_for_is_kept_as_text(value, kept):
    assert json_value(value) == kept


def test_a_torn_line_of_the_resumes_is_cut_off(tmp_path):
    (tmp_path / "resumes.jsonl").write_text('{"step": 6, "time": 1.0}\n{"step": 7, "ti')
    JsonlSink(tmp_path / "metrics.jsonl", resumed_step=8)
    records, _ = read_records(tmp_path / "resumes.jsonl", 99)
    assert [record["step"] for record in records] == [6, 8]
