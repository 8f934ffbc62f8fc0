"""Where a damaged checkpoint was asked for, the last good one before it is named."""

import shutil
from pathlib import Path

import pytest

from puzzle_align.config.checkpoint_faults import DamagedError
from puzzle_align.config.last_good import naming_last_good
from puzzle_align.config.model_path import find_saved
from puzzle_align.config.saved import find_checkpoint
from tests.unit.test_saved import make_checkpoint


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three checkpoints: the last cut, of the one before the tensors changed."""
    paths = [make_checkpoint(tmp_path, step) for step in (1, 2, 3)]
    (paths[2] / "job.json").write_text("{")
    (paths[1] / "__0_0.distcp").write_bytes(bytes(200))
    return tmp_path


@pytest.mark.parametrize(("whole", "step"), [(True, 1), (False, 2)])
@pytest.mark.parametrize("named", ["", "step_00000003"])
def test_the_one_to_take_is_named(folder: Path, whole: bool, step: int, named: str) -> None:
    with pytest.raises(DamagedError) as told, naming_last_good(whole=whole):
        find_checkpoint(folder / named)
    good = f"{folder}/step_{step:08d} is the last good one before it"
    assert str(told.value).startswith(f"checkpoint {folder}/step_00000003 is damaged")
    assert good in str(told.value)
    assert (", as far as sizes and small files tell" in str(told.value)) != whole


def test_a_model_s_path_is_told_of_likewise(folder: Path) -> None:
    with pytest.raises(ValueError, match=f"^actor.model: .*{folder}/step_00000002 is the last"):
        find_saved(folder, "actor.model")


def test_where_none_is_good_none_is_named(folder: Path) -> None:
    for step in (1, 2):
        shutil.rmtree(folder / f"step_{step:08d}")
    with pytest.raises(DamagedError) as told, naming_last_good(whole=True):
        find_checkpoint(folder)
    assert "no checkpoint before it is known to be good: name another" in str(told.value)
