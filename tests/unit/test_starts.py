"""Starts of a model, saved and now: no difference is lost in a long value."""

import json
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from puzzle_align.config.job import JobConfig
from puzzle_align.config.resolve import RoleModel
from puzzle_align.config.saved import Manifest, Saved, Start
from puzzle_align.files import checksums
from puzzle_align.files.checksums import FileSum
from puzzle_align.files.json_file import as_json, differences
from puzzle_align.layout.hf_config import to_hf_config
from puzzle_align.layout.model import RopeScaling
from puzzle_align.layout.plan import ParallelPlan
from puzzle_align.models.hf.sources import INDEX_NAME, SINGLE_NAME, SafetensorsSource
from puzzle_align.stages.weights import check_starts
from tests.checkpoints import flip
from tests.jobs import placed
from tests.specs import TINY
from tests.unit.job_plans import context

SCALING = RopeScaling(
    factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
)
NO_FILES = Manifest(3, "", {})
SPEC = replace(TINY, rope_scaling=SCALING)
FROZEN = {"reference": RoleModel(role="reference", key="actor.model", spec=TINY)}
JOB = placed(JobConfig(), context("actor", ParallelPlan(), model=TINY), models=FROZEN)


def _check(was: dict[str, Any], now: dict[str, Any]) -> None:
    began, own = (Start("model", values, "00") for values in (was, now))
    saved = Saved(Path("step_00000003"), 3, {}, {"starts": {"reference": began}}, NO_FILES)
    check_starts(JOB, {"reference": own}, saved)


@pytest.mark.parametrize(
    ("key", "value"), [("high_freq_factor", 5.0), ("original_max_position_embeddings", 4096)]
)
def test_a_change_deep_in_a_config_is_seen_and_reported(key: str, value: float) -> None:
    other = to_hf_config(replace(SPEC, rope_scaling=replace(SCALING, **{key: value})))
    own = to_hf_config(SPEC)
    _check(as_json(own), own)
    with pytest.raises(ValueError, match=f"began with rope_scaling.{key}=") as error:
        _check(as_json(own), other)
    was = vars(SCALING)[key]
    assert f"{key}={was}, and here is {value}: put it back, or start" in str(error.value)


def test_every_value_that_differs_is_reported_with_its_place() -> None:
    old = {"a": [{"b": 1}] * 90, "c": [1], "d": 2, "e": {"f": 3}}
    new = deepcopy(old) | {"c": [1, 2], "g": 4}
    new["a"][80] = {"b": 2}
    del new["d"]
    assert list(differences("", old, new, "unknown")) == [
        ("a[80].b", 1, 2),
        ("c", [1], [1, 2]),
        ("d", 2, None),
        ("g", "unknown", 4),
    ]
    assert list(differences("x", old, deepcopy(old))) == []


def test_any_flipped_byte_of_any_file_of_weights_changes_the_fingerprint(tmp_path: Path) -> None:
    first_folder, folder = tmp_path / "first", tmp_path / "moved"
    first_folder.mkdir()
    names = {"a": "part0.safetensors", "b": "part1.safetensors", "c": "part1.safetensors"}
    (first_folder / INDEX_NAME).write_text(json.dumps({"weight_map": names}))
    for file in {*names.values()}:
        tensors = {name: torch.randn(2**16) for name in names if names[name] == file}
        save_file(tensors, first_folder / file, metadata={"format": "pt"})
    first = SafetensorsSource(first_folder).fingerprint()
    first_folder.rename(folder)
    assert SafetensorsSource(folder).fingerprint() == first
    for file in {*names.values()}:
        data = (folder / file).read_bytes()
        start, metadata = 8 + int.from_bytes(data[:8], "little"), data.index(b'"pt"') + 1
        for place in (metadata, *range(start, len(data), 10_007), len(data) - 1):
            flip(folder / file, place)
            assert SafetensorsSource(folder).fingerprint() != first, (file, place)
            flip(folder / file, place)
    assert SafetensorsSource(folder).fingerprint() == first
    (folder / INDEX_NAME).write_text(json.dumps({"weight_map": {**names, "b": names["a"]}}))
    assert SafetensorsSource(folder).fingerprint() != first


def test_files_are_hashed_once_while_they_are_as_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several roles, and a table of the reference's log-probabilities, ask for one model's hash."""
    monkeypatch.setattr(checksums, "_FRESH_S", 0.0)
    file, read = tmp_path / SINGLE_NAME, []
    hash_file = FileSum.of
    monkeypatch.setattr(FileSum, "of", lambda path: read.append(path) or hash_file(path))
    save_file({"a": torch.zeros(9)}, file)
    first = SafetensorsSource(tmp_path).fingerprint()
    assert SafetensorsSource(tmp_path).fingerprint() == first and read == [file]
    flip(file, file.stat().st_size - 1)
    assert SafetensorsSource(tmp_path).fingerprint() != first and read == [file] * 2
