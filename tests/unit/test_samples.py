"""What reward functions logged of responses stands beside the samples that are kept of them."""

import json
import math
import sys

import numpy as np
import pytest

from puzzle_align.stages.rewards.functions import json_value
from puzzle_align.telemetry import Sample
from puzzle_align.telemetry.samples import samples_markdown
from puzzle_align.telemetry.sinks import JsonlSink, WandbSink
from tests.unit.test_telemetry import _FakeWandb

PLAIN = Sample("p", "", math.inf)
LOGGED = Sample("p", "r", 1.0, {"found": "8", "score": 3, "step": 9})


def test_names_of_our_own_columns_stay_ours(tmp_path):
    JsonlSink(tmp_path / "metrics.jsonl", None).write_samples(3, [LOGGED, PLAIN])
    first, last = map(json.loads, (tmp_path / "samples.jsonl").read_text().splitlines())
    assert first == {"step": 3, "prompt": "p", "response": "r", "score": 1.0, "found": "8"}
    assert last == {"step": 3, "prompt": "p", "response": "", "score": None}
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
