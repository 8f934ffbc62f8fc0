"""Records that a checkpoint has of itself: read where all agrees, else one line; and deletion."""

import json
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

from puzzle_align.config.check_resumed import check_same_config
from puzzle_align.config.load import find_config, load_file, load_job
from puzzle_align.config.model_path import find_saved
from puzzle_align.config.saved import (
    DamagedError,
    UnreadableError,
    checkpoint_paths,
    damaged,
    find_checkpoint,
    last_good,
    open_checkpoint,
)
from puzzle_align.files.json_file import as_json
from puzzle_align.layout.hf_config import to_hf_config
from puzzle_align.runtime.checkpoint.folder import delete_older, set_aside
from puzzle_align.runtime.checkpoint.reader import reading
from puzzle_align.runtime.checkpoint.weights import CheckpointWeights
from puzzle_align.stages.inputs import check_folders, check_seen, named_folders, to_resume
from puzzle_align.stages.resuming import _is_like
from tests.checkpoints import change_job, flip, reseal, seal
from tests.jobs import resolved
from tests.refusals import closed, refusal
from tests.specs import TINY
from tests.unit.plan_files import put
from tests.unit.test_check import SOUND

MODEL = {"model": to_hf_config(TINY), "dtype": "fp32", "world_size": 1, "has_optimizer": True}


def make_checkpoint(folder: Path, step: int, job_id: str = "a", resume: str = "auto") -> Path:
    """One of a job of stage dpo, with a small file in the place of tensors."""
    path = folder / f"step_{step:08d}"
    path.mkdir(parents=True)
    config = {"stage": "dpo", "checkpoint": {"resume": resume}}
    job = {"job_id": job_id, "step": step, "models": {"actor": MODEL}, "config": config}
    (path / "job.json").write_text(json.dumps(job))
    (path / "__0_0.distcp").write_bytes(bytes(range(100)) * step)
    seal(path, step, job_id)
    return path


def test_what_agrees_is_read(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, 3)
    saved = open_checkpoint(path)
    assert (saved.step, saved.job["job_id"], saved.main_role) == (3, "a", "actor")
    saved.check()


@pytest.mark.parametrize("name", ["job.json", "checksums.json", "__0_0.distcp"])
def test_every_flipped_bit_is_found(tmp_path: Path, name: str) -> None:
    path = make_checkpoint(tmp_path, 1)
    good = (path / name).read_bytes()
    for bit in range(0, 8 * len(good), 61):
        data = bytearray(good)
        data[bit // 8] ^= 1 << bit % 8
        (path / name).write_bytes(data)
        with pytest.raises(DamagedError):
            saved = open_checkpoint(path)
            problem = saved.manifest.files[name].problem(path / name)
            if problem is not None:  # as who loads the tensors finds it, piece by piece
                raise damaged(path, problem)


@pytest.mark.parametrize("name", ["job.json", "checksums.json"])
@pytest.mark.parametrize("other", [(2, "a"), (3, "b")])
def test_another_step_or_job_is_an_error(tmp_path: Path, name: str, other: tuple[int, str]) -> None:
    path, foreign = make_checkpoint(tmp_path, 3), make_checkpoint(tmp_path / "other", *other)
    (path / name).write_bytes((foreign / name).read_bytes())
    with pytest.raises(ValueError, match="damaged or incomplete"):
        open_checkpoint(path)


def test_the_directory_s_name_must_agree(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, 3).rename(tmp_path / "step_00000004")
    with pytest.raises(ValueError, match=r"\(it is of step 3 and of step 4\)"):
        find_checkpoint(tmp_path)
    assert find_checkpoint(path.rename(tmp_path / "kept")).step == 3


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        ("step", "3", "job.json.step: expected an integer, got '3'"),
        ("models", [], "job.json.models: expected a mapping, got a list"),
        ("models.actor", 3, "job.json.models.actor: expected a mapping, got 3"),
        ("models.actor.dtype", "fp64", "actor.dtype: expected fp32 or bf16, got 'fp64'"),
        ("state", "x" * 500, r"job.json.state: expected a mapping, got 'x+\.\.\.'"),
        ("config.dpo", 7, "job.json: config.dpo is 7, not a mapping"),
        ("config.tokenizer", None, "config.tokenizer is None, not a mapping"),
        ("config.output_dir", [1], r"config.output_dir is \[1\], not a text"),
    ],
)
def test_others_are_one_line(tmp_path: Path, place: str, value: Any, message: str) -> None:
    path = make_checkpoint(tmp_path, 3)
    job = json.loads((path / "job.json").read_text())
    put(job, place, value)
    (path / "job.json").write_text(json.dumps(job))
    reseal(path)
    line = refusal(lambda: open_checkpoint(path))
    assert re.search(message, line) and len(line) < 400 + len(str(path))


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, "3", "null", "\xff"])
def test_what_is_no_json_object_is_one_line(tmp_path: Path, text: str) -> None:
    path = make_checkpoint(tmp_path, 3)
    (path / "job.json").write_bytes(text.encode("latin-1"))
    reseal(path)
    with pytest.raises(ValueError, match=r"damaged or incomplete .job.json"):
        open_checkpoint(path)


@pytest.fixture
def three(tmp_path: Path) -> Path:
    """Three checkpoints: the last cut, the tensors of the one before of another size."""
    paths = [make_checkpoint(tmp_path, step) for step in (1, 2, 3)]
    (paths[2] / "job.json").write_text("{")
    (paths[1] / "__0_0.distcp").write_bytes(bytes(201))
    return tmp_path


def test_checkpoints_are_in_the_order_of_their_steps(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("step_00000007", "step_99999999", "step_100000000")]
    for path in (*paths, tmp_path / "step_8", tmp_path / "step_00000009_old"):
        path.mkdir()
    assert checkpoint_paths(tmp_path) == paths


def test_the_last_good_one_is_found_past_damaged_ones(three: Path) -> None:
    paths = checkpoint_paths(three)
    assert last_good(paths).step == 1
    with pytest.raises(DamagedError, match=r"step_00000003 is damaged .*none before it is good"):
        last_good(paths[1:])


def test_a_small_file_of_the_same_size_is_compared_and_tensors_when_they_are_loaded(
    tmp_path: Path,
) -> None:
    paths = [make_checkpoint(tmp_path, step) for step in (1, 2)]
    (paths[1] / "common.pt").write_bytes(bytes(9))
    (paths[1] / "checksums.json").unlink()
    seal(paths[1], 2, "a")
    flip(paths[1] / "__0_0.distcp", 5)
    assert last_good(paths).step == 2
    flip(paths[1] / "common.pt", 5)
    assert last_good(paths).step == 1


@pytest.mark.parametrize("named", ["", "step_00000003"])
def test_where_a_damaged_one_is_named_the_one_before_is_the_cure(three: Path, named: str) -> None:
    line = f"^actor.model: .*{three}/step_00000003 is damaged .*: take step_00000002, the one befo"
    with pytest.raises(ValueError, match=line):
        find_saved(three / named, "actor.model")
    for step in (1, 2):
        shutil.rmtree(three / f"step_{step:08d}")
    with pytest.raises(DamagedError, match="step_00000003 is damaged .*: take another$"):
        find_checkpoint(three / named)


def _to_resume(folder: Path, resume: str) -> int | None:
    """The step that a job in a folder of checkpoints goes on from."""
    given = [f"checkpoint.dir={folder}", f"checkpoint.resume={resume}"]
    saved = to_resume(load_job("stage: dpo", given))
    if saved is None:
        return None
    own = folder / f"step_{saved.step:08d}"  # however it was named
    assert saved.path == own or not checkpoint_paths(folder)
    return saved.step


@pytest.mark.parametrize("resume", ["auto", "must"])
def test_a_job_goes_on_from_the_last_good_one(three: Path, resume: str) -> None:
    assert _to_resume(three, resume) == 1
    (three / "step_00000001/checksums.json").unlink()
    anew = "none before it is good; move all away to start anew, or choose another output_dir$"
    for gone in ("step_00000001", "step_00000002"):
        with pytest.raises(DamagedError, match=rf"step_00000003 is damaged .*: {anew}"):
            _to_resume(three, resume)
        named = r"none before it is good; name .*, or set checkpoint.resume=auto and .* start anew$"
        with pytest.raises(ValueError, match=rf"step_00000003 is damaged .*: {named}"):
            _to_resume(three, str(three / "step_00000003"))
        shutil.rmtree(three / gone)


def test_a_job_without_checkpoints_starts_anew_or_must_not(tmp_path: Path) -> None:
    assert _to_resume(tmp_path, "auto") is None
    with pytest.raises(ValueError, match=f"resume=must: no checkpoint in {tmp_path}; set it to"):
        _to_resume(tmp_path, "must")
    set_aside(make_checkpoint(tmp_path, 3), "it is cut")
    away = r"only damaged checkpoints \(damaged_step_00000003\): move them away, .* to start anew"
    for resume, end in (("auto", ""), ("must", " with checkpoint.resume=auto")):
        with pytest.raises(ValueError, match=f"{away}{end}$"):
            _to_resume(tmp_path, resume)


def test_folders_of_another_user_are_named_in_one_line(tmp_path: Path) -> None:
    theirs, mine = tmp_path / "theirs", Path("/no folder")
    make_checkpoint(theirs / "run", 1)
    keys = ("output_dir", "checkpoint.dir", "data.cache_dir")
    config = load_job("stage: dpo", [f"{key}={theirs / key}" for key in keys])
    job = resolved(load_job(SOUND, [f"tokenizer.path={theirs}/tokenizer"]))
    given = [("auto", theirs / "run"), (f"{theirs}/run/step_00000001", mine)]
    with closed(theirs):
        lines = check_folders(config)
        refusals = [refusal(partial(_to_resume, folder, resume)) for resume, folder in given]
        unseen = refusal(partial(check_seen, {"reward.model.path": theirs / "model"}))
        assert named_folders(job) == {}  # whose tokenizer is said to be missing when it is opened
    for key, line in zip(keys, lines, strict=True):
        assert line.startswith(f"{key}: {theirs / key} cannot be written: ")
    assert refusals[0].startswith(f"{theirs}/run cannot be read (run: Permission denied)")
    step = "step_00000001: Permission denied"
    assert refusals[1].startswith(f"checkpoint.resume: {given[1][0]} cannot be read ({step})")
    assert unseen.startswith(f"reward.model.path: {theirs}/model cannot be read (model: Permission")


def test_checkpoints_that_cannot_be_listed_are_one_line() -> None:
    with TemporaryDirectory() as name:  # others cannot enter tmp_path
        run = Path(name) / "run"
        run.mkdir()
        run.parent.chmod(0o755)
        with closed(run, mode=0o711):
            line = refusal(partial(find_saved, run, "actor.model.path"))
    assert f" as a checkpoint: {run} cannot be read (run: Permission denied), and is left" in line


def test_folders_in_output_dir_are_checked_if_they_are_there(tmp_path: Path) -> None:
    config = load_job("stage: dpo", [f"output_dir={tmp_path}"])
    (tmp_path / "checkpoints").mkdir()
    assert check_folders(config) == []
    (tmp_path / "checkpoints").rmdir()
    (tmp_path / "checkpoints").touch()
    (line,) = check_folders(config)
    assert line.startswith(f"checkpoint.dir: {tmp_path}/checkpoints cannot be made: ")


def test_a_missing_wandb_is_said_with_the_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    given = [f"output_dir={tmp_path}/out", "telemetry.wandb_project=p"]
    (line,) = check_folders(load_job("stage: dpo", given))
    assert line.startswith("telemetry.wandb_project=p: wandb is not installed; pip install ")
    assert not check_folders(load_job("stage: dpo", given[:1]))


def test_folders_that_only_one_node_has_are_named_by_their_keys(tmp_path: Path) -> None:
    """Those of models and tokenizer, if this node has them; the reference has the actor's."""
    given = [f"tokenizer.path={tmp_path / 'tokenizer'}", f"actor.model.path={tmp_path / 'model'}"]
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(to_hf_config(TINY)))
    job = resolved(load_job("stage: dpo", given))
    here = named_folders(job)
    assert here == {"actor.model.path": tmp_path / "model"}
    (tmp_path / "tokenizer").mkdir()
    assert named_folders(job) == {**here, "tokenizer.path": tmp_path / "tokenizer"}
    assert named_folders(resolved(load_job(SOUND))) == {}  # of random weights
    check_seen(here)
    gone = {"reward.model.path": tmp_path / "gone"}
    with pytest.raises(ValueError, match="^reward.model.path: .*/gone: no such directory there"):
        check_seen({**here, **gone})


def test_a_job_goes_on_from_the_one_that_is_named(tmp_path: Path) -> None:
    other, mine = tmp_path / "other", tmp_path / "mine"
    paths = [make_checkpoint(other, step) for step in (1, 2)]
    assert _to_resume(mine, str(paths[0])) == 1
    assert _to_resume(mine, str(other)) == _to_resume(other, str(paths[1])) == 2
    make_checkpoint(mine, 1)
    assert _to_resume(other, f"{mine}/../other") == 2
    for folder in (other, mine):
        with pytest.raises(ValueError, match=r"resume=.*step_0000000\d exists too and would be"):
            _to_resume(folder, str(paths[0]))
    (paths[1] / "__0_0.distcp").unlink()
    with pytest.raises(ValueError, match="^checkpoint.resume: .*distcp is missing.*: take step_0"):
        _to_resume(tmp_path / "new", str(other))
    for name in (paths[1], mine / "../other/step_00000002"):
        with pytest.raises(ValueError, match="is missing.*: set checkpoint.resume=auto, which tak"):
            _to_resume(other, str(name))  # it would refuse the one before
    with pytest.raises(ValueError, match="resume: never: no such directory; give auto, must or a"):
        _to_resume(mine, "never")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="^checkpoint.resume: .*empty: no checkpoint there; give"):
        _to_resume(mine, str(tmp_path / "empty"))


def test_a_command_that_names_one_goes_on_from_its_own(tmp_path: Path) -> None:
    mine, first = tmp_path / "mine", str(make_checkpoint(tmp_path / "other", 2))
    own = [make_checkpoint(mine, step, resume=first) for step in (3, 4, 5)]
    (own[2] / "__0_0.distcp").unlink()
    assert _to_resume(mine, first) == 4  # the last good one
    with pytest.raises(ValueError, match="step_00000005 exists too and would be mixed"):
        _to_resume(mine, str(tmp_path / "other"))
    further = make_checkpoint(tmp_path / "on", 3, resume=first), make_checkpoint(tmp_path / "on", 4)
    with pytest.raises(ValueError, match=f"{further[1]} exists too"):  # of another command
        _to_resume(tmp_path / "on", first)
    (own[2] / "job.json").unlink()  # which would say whose it is
    with pytest.raises(ValueError, match="step_00000005 exists too and would be mixed"):
        _to_resume(mine, first)
    shutil.rmtree(own[2])
    shutil.rmtree(tmp_path / "other")
    assert _to_resume(mine, first) == 4


def test_damaged_ones_do_not_push_out_the_last_good_one(tmp_path: Path) -> None:
    paths = [make_checkpoint(tmp_path, step) for step in (1, 2, 3, 4)]
    for path, name in zip(paths[2:], ("__0_0.distcp", "job.json"), strict=True):
        (path / name).write_bytes(b"")
    delete_older(tmp_path, 1)
    assert sorted(tmp_path.iterdir()) == paths[1:]
    delete_older(tmp_path, 2)
    assert sorted(tmp_path.iterdir()) == paths[1:]
    make_checkpoint(tmp_path, 5)
    delete_older(tmp_path, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000005"]


def test_what_is_set_aside_is_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("damaged_step_00000003", "damaged_step_00000003.1"):
        set_aside(make_checkpoint(tmp_path, 3), "it is cut")
        assert (tmp_path / name / "job.json").is_file()
        assert f"step_00000003 is damaged (it is cut): it is now {name}" in caplog.text


def _make_unreadable(file: Path) -> None:
    """Break the disk: the file is there, and opening it is an OSError of another kind."""
    file.unlink()
    file.symlink_to(file.name)  # a loop


@pytest.mark.parametrize("name", ["job.json", "checksums.json", "__0_0.distcp"])
def test_what_cannot_be_read_is_not_called_damaged(tmp_path: Path, name: str) -> None:
    paths = [make_checkpoint(tmp_path, step) for step in (1, 2)]
    _make_unreadable(paths[1] / name)
    with pytest.raises(UnreadableError) as error:
        last_good(paths)
    assert f"{paths[1]} cannot be read now ({name}: Too many levels" in str(error.value)
    delete_older(tmp_path, 1)
    assert sorted(tmp_path.iterdir()) == paths


@pytest.mark.parametrize("name", ["job.json", "__0_0.distcp"])
def test_what_is_missing_is_damaged(tmp_path: Path, name: str) -> None:
    paths = [make_checkpoint(tmp_path, step) for step in (1, 2)]
    (paths[1] / name).unlink()
    assert last_good(paths).step == 1
    (paths[1] / name).mkdir()
    with pytest.raises(DamagedError):
        last_good(paths[1:])


@pytest.mark.parametrize(
    ("fail", "message"),
    [
        (lambda: bytearray(2**62), "cannot be read now (MemoryError: )"),
        (lambda: torch.empty(2**60), "cannot be read now (RuntimeError: [enforce fail at"),
        (lambda: (_ for _ in ()).throw(OSError(116, "Stale file handle", "a/b")), "(b: Stale file"),
        (lambda: torch.empty(3).reshape(2), "does not load (RuntimeError: shape '[2]' is invalid"),
    ],
)
def test_nothing_but_damage_is_called_so(fail: Callable[[], object], message: str) -> None:
    step = Path("step_00000003")
    with pytest.raises(ValueError, match="^checkpoint step_00000003 ") as error, reading(step):
        fail()
    assert message in str(error.value) and "left as it is" in str(error.value)
    assert not isinstance(error.value, DamagedError)
    with pytest.raises(DamagedError, match=r"\(lost is missing\)"), reading(step):
        Path("lost").stat()


def test_weights_to_start_from_that_cannot_be_read_are_one_line(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, 1)
    weights = CheckpointWeights(open_checkpoint(path), "actor", TINY, None)
    (path / ".metadata").symlink_to(".metadata")
    for use in (weights.check, weights.fingerprint):
        with pytest.raises(UnreadableError, match=r"cannot be read now \(.metadata: Too many"):
            use()


@pytest.mark.parametrize(
    ("found", "is_like"),
    [
        ({"a": 1.0, "b": {"c": 2}}, True),
        ({"a": 1.0, "b": {"c": "2"}}, False),
        ({"a": 1.0, "b": {"c": True}}, False),
        ({"a": 1.0, "b": {}}, False),
        ({"a": float("inf"), "b": {"c": 2}}, False),
        ({"a": 1, "b": {"c": 2}}, False),
        ([], False),
    ],
)
def test_a_stage_s_state_is_compared_to_its_depth(found: Any, is_like: bool) -> None:
    assert _is_like({"a": 0.5, "b": {"c": 7}}, found) == is_like


LORA = '{"r": 8, "lora_alpha": 8.0, "lora_dropout": 0.0, "target_modules": "all-linea...'


@pytest.mark.parametrize(
    ("was", "now", "line"),
    [
        ("actor.lora=null", "actor.lora.r=8", f"actor.lora is {LORA}, but null in "),
        ("actor.lora.r=8", "actor.lora=null", f"actor.lora is null, but {LORA} in "),
        ("actor.lora.r=8", "actor.lora.r=4", "actor.lora.r is 4, but 8 in "),
        ("dpo.loss_function=a:b", "seed=42", "dpo.loss_function is null, but a:b in "),
        ("dpo.use_weighting=true", "seed=42", "dpo.use_weighting is false, but true in "),
    ],
)
def test_a_changed_key_is_named_with_values_as_configs_have_them(
    tmp_path: Path, was: str, now: str, line: str
) -> None:
    path = make_checkpoint(tmp_path, 1)
    config = as_json(asdict(load_file(find_config("dpo_tiny"), [was])))
    change_job(path, lambda job: job.update(config=config))
    with pytest.raises(ValueError, match=re.escape(f"{line}{path}: restore it")):
        check_same_config(load_file(find_config("dpo_tiny"), [now]), open_checkpoint(path))


@pytest.mark.parametrize(
    ("stage", "key", "default"), [("dpo", "dpo.beta", 0.1), ("grpo", "ppo.kl_coef", 0.001)]
)
def test_a_key_that_an_older_version_did_not_save_had_the_stage_s_default(
    tmp_path: Path, stage: str, key: str, default: float
) -> None:
    path, file, (section, name) = make_checkpoint(tmp_path, 1), f"{stage}_tiny", key.split(".")
    config = as_json(asdict(load_file(find_config(file))))
    del config[section][name]
    change_job(path, lambda job: job.update(config=config))
    check_same_config(load_file(find_config(file), [f"{key}={default}"]), open_checkpoint(path))
    with pytest.raises(ValueError, match=f"{key} is 0.5, but unknown in "):
        check_same_config(load_file(find_config(file), [f"{key}=0.5"]), open_checkpoint(path))
