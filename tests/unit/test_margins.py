"""Margins of pairs, from a column of the data to the rows."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from puzzle_align.commands.prepare import pack_data
from puzzle_align.config.load import load_job
from puzzle_align.config.sections.data import DataConfig, PackingConfig
from puzzle_align.data.build import Preparation
from puzzle_align.data.dataset import ExampleDataset, from_examples, split
from puzzle_align.data.errors import DataError
from puzzle_align.data.loader import collate_row
from puzzle_align.data.packed_files import load_packed, write_packed
from puzzle_align.data.packing import Rows
from puzzle_align.data.prepare import Prepared, prepare_data
from puzzle_align.data.records import to_margin
from puzzle_align.data.tokenize import ByteTokenizer
from puzzle_align.files.messages import quoted
from puzzle_align.stages.preference.data import job_pairs
from tests.refusals import refusal
from tests.unit.labelled import with_labels

PAIR = {"prompt": "ab", "chosen": "cd", "rejected": "e"}


def read(folder: Path, rows: list[dict[str, Any]], **options: Any) -> Prepared[ExampleDataset]:
    source = folder / "pairs.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = DataConfig(train=str(source), **options)
    return prepare_data(
        config,
        PackingConfig(),
        ByteTokenizer(),
        Preparation(folder / "cache"),
        add_eos=True,
        seed=0,
        margins=True,
    )


def test_margins_are_read_and_cached(tmp_path) -> None:
    rows = [{**PAIR, "margin": 0.5}, PAIR, {**PAIR, "margin": -2}, {**PAIR, "margin": None}]
    first, again = (read(tmp_path, rows).train for _ in range(2))
    for dataset in (first, again):
        assert dataset.labels_of(np.arange(4)).tolist() == [0.5, 0.0, -2.0, 0.0]
    assert first.fingerprint == again.fingerprint
    rows[1] = {**PAIR, "margin": 1.0}
    assert read(tmp_path, rows).train.fingerprint != first.fingerprint


def test_data_without_margins_is_data_with_zeros(tmp_path) -> None:
    none = read(tmp_path, [PAIR, PAIR]).train
    zeros = read(tmp_path, [{**PAIR, "margin": 0}, PAIR]).train
    assert none.labels is None and zeros.labels is None
    assert none.fingerprint == zeros.fingerprint
    assert none.labels_of(np.arange(2)).tolist() == [0.0, 0.0]


def test_a_stage_without_margins_does_not_look_at_them(tmp_path) -> None:
    source = tmp_path / "pairs.jsonl"
    source.write_text(json.dumps({**PAIR, "margin": "much"}) + "\n")
    config = DataConfig(train=str(source))
    given = (config, PackingConfig(), ByteTokenizer(), Preparation())
    assert prepare_data(*given, add_eos=True, seed=0).train.labels is None


@pytest.mark.parametrize("value", ["1.5x", True, [1.0], float("nan"), float("inf"), 10**400])
def test_a_bad_margin_is_reported_in_one_line(value) -> None:
    line = refusal(lambda: to_margin({"margin": value}, "pairs.jsonl:3"), DataError)
    assert line.startswith(
        f"pairs.jsonl:3: field 'margin' is {quoted(value)}, not a finite number; give"
    )
    assert len(line) < 250


def test_a_row_with_a_bad_margin_can_be_left_out(tmp_path) -> None:
    rows = [{**PAIR, "margin": "x"}, {**PAIR, "margin": 3}]
    data = read(tmp_path, rows, on_error="skip")
    assert data.report.skipped == {"bad margin": 1}
    assert data.train.labels_of(np.arange(1)).tolist() == [3.0]


def three_pairs() -> ExampleDataset:
    pairs = from_examples([([1], [[2], [3]]), ([4], [[5], [6]]), ([7], [[8], [9]])], 0)
    return with_labels(pairs, np.array([0.5, 1.5, 2.5]))


@pytest.mark.parametrize("layout", ["shared", "paired"])
def test_rows_carry_the_margins_of_their_pairs(layout) -> None:
    members = np.array([2, 0, 1])
    row = collate_row(three_pairs(), members, np.array([2, 0]), layout=layout, num_tokens=12)
    assert row.example_ids.tolist() == [2, 2, 0, 0]
    assert row.labels.tolist() == [1.5, 1.5, 2.5, 2.5]


def test_margins_follow_a_split_and_packed_files(tmp_path) -> None:
    train, held_out = split(three_pairs(), 0.3, seed=0)
    kept = [*train.labels_of(np.arange(2)), *held_out.labels_of(np.arange(1))]
    assert sorted(kept) == [0.5, 1.5, 2.5]
    one_row = Rows(np.array([1, 0, 2]), np.array([0, 3]))
    settings = {"packing.row_tokens": 9, "packing.layout": "shared"}
    write_packed(tmp_path / "packed", three_pairs(), one_row, settings, ByteTokenizer())
    loaded = load_packed(tmp_path / "packed", ByteTokenizer(), settings).dataset
    assert loaded.labels_of(np.arange(3)).tolist() == [0.5, 1.5, 2.5]
    assert loaded.fingerprint == three_pairs().fingerprint


def test_files_packed_without_margins_are_no_reward_model_s(tmp_path) -> None:
    """Files that a reward model's job has packed are also a policy's."""
    source = tmp_path / "pairs.jsonl"
    source.write_text(json.dumps({**PAIR, "margin": 0.5}))
    labels = {}
    for packer in ("dpo", "reward"):
        keys = f"{{tokenizer: {{path: byte}}, data: {{train: {source}, format: auto}}}}"
        pack_data(load_job(keys, [f"stage={packer}"]), tmp_path / packer)
        for reader in ("dpo", "reward"):
            packed = ["data.format=packed", f"data.train={tmp_path / packer}", f"stage={reader}"]
            job = load_job(keys, packed)
            if (packer, reader) == ("dpo", "reward"):
                said = refusal(lambda job=job: job_pairs(job, ByteTokenizer()))
                assert "was packed with margins=false; this job has margins=true" in said
            else:
                labels[packer, reader] = job_pairs(job, ByteTokenizer()).train.labels
    assert labels["dpo", "dpo"] is None and labels["reward", "reward"].tolist() == [0.5]
