"""``puzzle-align plan``: from a profile to a plan.json that a run takes, and what it refuses."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.image import imread

from puzzle_align.config.load import find_config, load_file
from puzzle_align.planning.costs.profile import Profile, load_profile, save_profile
from puzzle_align.planning.plan_file import open_plan
from tests.command import main
from tests.declared import tiny_profile
from tests.e2e.launch import run_job

FEW = ("data.num_synthetic=256", "telemetry.progress=false")
Plan = Callable[..., tuple[int, str, str]]


@pytest.fixture
def plan(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch) -> Plan:
    """``plan(config, *arguments)`` with a declared profile: exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)

    def call(name: str, *arguments: str, profile: Profile | None = None) -> tuple[int, str, str]:
        job = load_file(find_config(name), FEW)
        save_profile(profile or tiny_profile(job), tmp_path / "profile.json")
        own = [*FEW, f"output_dir={tmp_path}/out"]
        asked = ["--profile", "profile.json", *arguments]
        code = main(["plan", "--config", name, *asked, *own])
        shown = capsys.readouterr()
        return code, shown.out, shown.err

    return call


@pytest.mark.parametrize("name", ["dpo_tiny", "kto_tiny", "reward_tiny", "ppo_tiny"])
def test_a_plan_is_made_told_of_and_run(name: str, plan: Plan, tmp_path: Path) -> None:
    code, shown, errors = plan(name, "--gpus", "2", "--png", "passes.png")
    assert code == 0, errors
    lines = shown.splitlines()
    best = next(line for line in lines if line.startswith("   1 "))
    predicted = open_plan(tmp_path / "plan.json").predicted
    assert sum(predicted.phases.values()) == pytest.approx(predicted.iteration)
    assert "run it with --plan" in lines[-1] or "extrapolated" in lines[-1]
    assert best.split()[0] == "1" and "loses by" in shown and "makespan" in shown
    assert imread(tmp_path / "passes.png").ndim == 3
    done = run_job(
        "--config", name, "--plan", str(tmp_path / "plan.json"), *FEW, "max_steps=3",
        f"output_dir={tmp_path}/run", "telemetry.tensorboard=false",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "run" / "plan_report.json").read_text())
    assert set(report["times"]) == {*predicted.phases, "iteration"}
    assert all(each["measured"] > 0 for each in report["times"].values())


def test_several_sizes_of_cluster_are_told_of_and_no_plan_is_written(
    plan: Plan, tmp_path: Path
) -> None:
    code, shown, _ = plan("ppo_tiny", "--gpus", "1,2,4", "--png", "growth.png")
    assert code == 0
    rows = [line.split() for line in shown.splitlines() if line[:6].strip().isdecimal()]
    assert [row[0] for row in rows] == ["1", "2", "4"]
    assert rows[0][4] == "100%"
    assert imread(tmp_path / "growth.png").ndim == 3
    assert not (tmp_path / "plan.json").exists()


def test_where_nothing_fits_the_nearest_plan_is_told(plan: Plan, tmp_path: Path) -> None:
    code, _, errors = plan("dpo_tiny", "--gpus", "2", "--memory", "0.0001")
    (line,) = errors.splitlines()
    assert code == 2 and line.startswith("error: --gpus 2: no plan fits the 0.0 GiB of a rank")
    assert "the nearest, actor (P" in line and "take more ranks" in line
    assert not (tmp_path / "plan.json").exists()


@pytest.mark.parametrize(
    ("change", "overrides", "message"),
    [
        (lambda p: replace(p, links=()), [], "the profile has no "),
        (None, ["engine.dtype=bf16"], "engine.dtype: bf16, but the profile was measured with fp32"),
        (
            None,
            ["optimizer.state_dtype=bf16", "optimizer.use_distributed_optimizer=true"],
            "optimizer.state_dtype: bf16, but the profile's optimizer steps were measured with",
        ),
        (None, [], "the longest example needs"),
        (
            None,
            ["placement.reference=sequential"],
            "plan decides 'placement.reference'",
        ),
    ],
)
def test_what_does_not_fit_the_job_is_one_line(
    change: Callable[[Profile], Profile] | None,
    overrides: list[str],
    message: str,
    plan: Plan,
    tmp_path: Path,
) -> None:
    profile = tiny_profile(load_file(find_config("dpo_tiny"), FEW))
    if message.startswith("the longest"):
        profile = tiny_profile(load_file(find_config("dpo_tiny"), FEW), rows=(8,))
    changed = change(profile) if change else profile
    code, _, errors = plan("dpo_tiny", "--gpus", "2", *overrides, profile=changed)
    (line,) = errors.splitlines()
    assert code == 2 and message in line, line


def test_a_file_that_is_no_profile_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["plan", "--config", "dpo_tiny", "--gpus", "2", "--profile"]
    broken = tmp_path / "broken.json"
    broken.write_text("{")
    other = tmp_path / "other.json"
    other.write_text('{"format": 0}')
    for path, message in (
        (tmp_path / "none.json", "no such file; make it with launch/profile.py"),
        (broken, "make it with launch/profile.py"),
        (other, "format 0, and this version reads 1"),
    ):
        assert main([*asked, str(path)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"error: {path}") and message in line


def test_a_profile_survives_its_file(tmp_path: Path) -> None:
    profile = tiny_profile(load_file(find_config("ppo_tiny"), FEW))
    save_profile(profile, tmp_path / "profile.json")
    assert load_profile(tmp_path / "profile.json") == profile
