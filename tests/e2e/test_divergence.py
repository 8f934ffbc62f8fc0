"""Training that diverges ends with one line, whatever the stage, and saves nothing spoilt."""

from pathlib import Path

import pytest

from tests.e2e.conftest import Command
from tests.e2e.launch import SMALL, run_job
from tests.metrics import records

QUIET = ("telemetry.tensorboard=false", "telemetry.progress=false", "checkpoint.save_every=1")
TOO_FAST = (*SMALL, *QUIET, "optimizer.lr=1e6", "optimizer.max_skipped_steps=2")


def _error(lines: list[str]) -> str:
    (line,) = [line for line in lines if line.startswith("error")]
    assert not any("Traceback" in other for other in lines)
    return line


def test_a_learning_rate_that_is_too_high_ends_the_job_and_so_it_does_again(
    tmp_path: Path, train: Command
) -> None:
    """The update that spoils the weights has a fine loss, and is saved: not in place of another."""
    job = (f"output_dir={tmp_path}", "max_steps=12", "checkpoint.keep_last=1")
    last = tmp_path / "checkpoints/step_00000002"
    first = run_job(*TOO_FAST, *job)
    assert _kept(tmp_path) == ["step_00000001", "step_00000002"]
    code, _, errors = train(*TOO_FAST, *job)  # goes on from the last checkpoint
    assert first.returncode == code == 2
    for lines in (first.stderr.splitlines(), errors):
        line = _error(lines)
        assert line.startswith("error: the actor learns nothing any more: its last 3 updates, from")
        assert "gradient norm nan" in line and "optimizer.max_skipped_steps=2" in line
        assert line.endswith(
            f"; the last checkpoint is {last}; if a run from it fails too, move it away to resume"
            " from step_00000001"
        )
    assert _kept(tmp_path) == ["step_00000001", "step_00000002"]
    last.rename(tmp_path / "spoilt")
    code, _, errors = train(*SMALL, *QUIET, *job)
    assert code == 0, errors
    assert _kept(tmp_path) == ["step_00000011", "step_00000012"]


def _kept(output: Path) -> list[str]:
    return sorted(path.name for path in (output / "checkpoints").glob("step_*"))


@pytest.mark.parametrize(
    ("job", "role"),
    [
        (("--config", "reward_tiny", "reward.model.config.num_hidden_layers=1"), "reward"),
        (("--config", "kto_tiny", "actor.model.config.num_hidden_layers=1"), "actor"),
    ],
)
def test_a_run_does_not_end_well_with_updates_that_fail(
    job: tuple[str, ...], role: str, tmp_path: Path, train: Command
) -> None:
    """Fewer of them than would end it before its time."""
    rate = ("optimizer.lr=1e18", "optimizer.weight_decay=1e18", "optimizer.warmup_steps=0")
    few = ("data.num_synthetic=64", "global_batch_size=16", "max_steps=3")
    code, _, errors = train(*job, *QUIET, *rate, *few, f"output_dir={tmp_path}")
    assert code == 2
    line = _error(errors)
    assert f"the {role} learns nothing any more: its last 2 updates, from step 2 on, failed" in line
    assert records(tmp_path)[-1]["step"] == 3


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (
            ["reward.function=tests.e2e.bad_rewards:large", "optimizer.max_skipped_steps=3"],
            "error: the critic learns nothing any more: its last 4 updates, from step 1 on, failed",
        ),
        (
            ["reward.function=tests.e2e.bad_rewards:large", "reward.weights=[1e20]"],
            "error: reward.weights: the weighted sum of response 0 to prompt ",
        ),
    ],
)
def test_rewards_that_float32_cannot_hold(
    overrides: list[str], line: str, tmp_path: Path, train: Command
) -> None:
    sizes = ("hidden_size=32", "intermediate_size=64", "num_hidden_layers=1")
    few = ("data.num_synthetic=64", "global_batch_size=8", "max_steps=3")
    job = ("--config", "ppo_tiny", *(f"actor.model.config.{size}" for size in sizes), *few)
    code, _, errors = train(*job, *QUIET, f"output_dir={tmp_path}", *overrides)
    assert code == 2 and _error(errors).startswith(line), errors
