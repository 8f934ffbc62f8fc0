"""The tiny config, from the command to everything it leaves behind; and its walk to a forward.

The walk from ``launch/train.py`` to a model's forward has few frames, as few as its ideas.
"""

import math
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import pytest

from puzzle_align import __version__
from puzzle_align.models.chunk import ModelChunk
from tests import metrics
from tests.e2e.launch import ROOT, launched, run_job, torchrun

Launcher = Callable[..., subprocess.CompletedProcess[str]]
NUM_STEPS = 16
METRICS = {
    "loss",
    "grad_norm",
    "learning_rate",
    "rewards/chosen",
    "rewards/rejected",
    "rewards/margins",
    "rewards/accuracies",
    "logps/chosen",
    "logps/rejected",
}


def _arguments(output: Path) -> list[str]:
    return [
        *("--config", "dpo_tiny", f"output_dir={output}", f"max_steps={NUM_STEPS}"),
        *("global_batch_size=32", "data.num_synthetic=840", "data.eval_fraction=0.05"),
        *("optimizer.lr=2e-3", "optimizer.use_distributed_optimizer=true"),
        "actor.parallel.recompute=selective",  # Megatron warns of it
    ]


# Without imports of its own, and as a user starts it.
@pytest.fixture(scope="module", params=[launched, pytest.param(torchrun, marks=pytest.mark.slow)])
def launcher(request: pytest.FixtureRequest) -> Launcher:
    return request.param


@pytest.fixture(scope="module")
def output(launcher: Launcher, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("run")


@pytest.fixture(scope="module")
def job(launcher: Launcher, output: Path) -> subprocess.CompletedProcess[str]:
    return launcher(
        *_arguments(output),
        "telemetry.log_every=8",
        "telemetry.eval_every=8",
        "checkpoint.save_every=8",
    )


@pytest.fixture(scope="module")
def records(job, output: Path) -> list[dict[str, float]]:
    assert job.returncode == 0, job.stderr
    return metrics.records(output)


def test_training_starts_at_the_reference(records) -> None:
    steps = {record["step"]: record for record in records if "loss" in record}
    assert sorted(steps) == [1, 8, 16]
    assert steps[1]["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert steps[16]["loss"] < steps[1]["loss"]
    for record in steps.values():
        assert record.keys() > METRICS
        assert record["pairs_per_second"] > 0 and 0 < record["fill"] <= 1


def test_held_out_pairs_are_evaluated(records) -> None:
    evals = {record["step"]: record for record in records if "eval_loss" in record}
    assert sorted(evals) == [0, 8, 16]
    assert evals[0]["eval_loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert evals[0]["eval_rewards/accuracies"] == 0.5  # ties count half
    assert evals[16]["eval_rewards/accuracies"] >= 0.9
    assert {f"eval_{name}" for name in METRICS - {"grad_norm", "learning_rate"}} < evals[16].keys()


def test_events_and_checkpoints_are_there(records, output: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(output / "tensorboard"))
    events.Reload()
    losses = {event.step: event.value for event in events.Scalars("train/loss")}
    assert losses[1] == pytest.approx(math.log(2), abs=1e-6)
    saved = sorted(path.name for path in (output / "checkpoints").glob("step_*"))
    assert saved == ["step_00000008", "step_00000016"]


OPENING = """\
puzzle-align {version}: dpo on 2 ranks: starting
actor: llama, 854k parameters, (P1, D2, T1), ranks 0 to 1, random weights
reference: llama, 854k parameters, (P1, D2, T1), ranks 0 to 1, random weights
output: {output}
data: 840 pairs, 0 of them truncated; 42 of them held out
steps: 16 (25 an epoch), each of 32 pairs
microbatches of a step and data rank: 1; fill 68.6%
memory is for 8 of them, as many as examples of data.max_length=128 take
train, sequential: reference, actor
memory, predicted: at most .* MiB on a rank"""


def test_a_healthy_run_says_what_matters_and_nothing_else(job, output: Path) -> None:
    lines = job.stderr.splitlines()
    opening = OPENING.format(version=__version__, output=output).splitlines()
    assert lines[: len(opening) - 1] == opening[:-1]
    assert re.fullmatch(opening[-1], lines[len(opening) - 1])
    progress = [line for line in lines if line.startswith(("step ", "eval at step "))]
    assert len(progress) == 3 + 3
    summary = lines[lines.index("summary") :]
    assert lines == [*lines[: len(opening)], *progress, *summary]  # no library's warnings
    assert [line.split(maxsplit=1) for line in summary[-4:]] == [
        ["checkpoint", f"{output}/checkpoints/step_00000016"],
        ["output", str(output)],
        ["next", f"puzzle-align convert {output} {output}/hf"],
        ["puzzle-align", f"generate --model {output} --prompt TEXT"],
    ]
    assert any(line.split() == ["steps", "16", "of", "16"] for line in summary)
    assert any(line.split() == ["skipped", "steps", "0"] for line in summary)
    assert job.stdout == ""


def test_a_finished_run_started_again_trains_nothing(job, records, output: Path) -> None:
    before = (output / "metrics.jsonl").read_text()
    again = run_job(*_arguments(output), "checkpoint.resume=must")
    assert again.returncode == 0, again.stderr
    assert "step 1/" not in again.stderr
    assert (output / "metrics.jsonl").read_text() == before


MOST = 8


def _walk(frame: FrameType | None) -> list[str]:
    """Functions of the package and its launch script that lead to a frame, outermost first."""
    names: list[str] = []
    while frame is not None:
        file = Path(frame.f_code.co_filename)
        if any(file.is_relative_to(ROOT / folder) for folder in ("puzzle_align", "launch")):
            names.append(f"{file.stem}.{frame.f_code.co_name}")
        frame = frame.f_back
    return names[::-1]


def test_a_forward_is_eight_frames_or_fewer_from_the_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = str(ROOT / "launch/train.py")
    sizes = ("max_steps=1", "global_batch_size=2", "data.num_synthetic=8", "data.eval_fraction=0.5")
    quiet = ("telemetry.progress=false", "telemetry.tensorboard=false")
    arguments = ["--config", "dpo_tiny", *sizes, *quiet, f"output_dir={tmp_path}"]
    monkeypatch.setattr(sys, "argv", [script, *arguments])
    walks: dict[str, list[str]] = {}
    forward = ModelChunk.forward

    def noted(*args, **named):
        walk = _walk(sys._getframe(1))
        walks.setdefault("evaluation" if "trainer.evaluate" in walk else "step", walk)
        return forward(*args, **named)

    monkeypatch.setattr(ModelChunk, "forward", noted)
    runpy.run_path(script, run_name="__main__")
    assert walks.keys() == {"evaluation", "step"}
    for walk in walks.values():
        assert walk[0] == "train.<module>" and len(walk) + 1 <= MOST, walk
