"""Ctrl-C, as a terminal sends it: the step is saved, and the same command goes on from it."""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from puzzle_align.config.load import load_file
from tests.e2e.conftest import Command
from tests.e2e.launch import (
    ROOT,
    SMALL,
    fork_launcher,
    launcher_arguments,
    python_path,
    running_job,
)
from tests.metrics import records

ENDLESS = (*SMALL, "max_steps=100000", "telemetry.log_every=1", "telemetry.tensorboard=false")
PATIENCE_S = 60.0


def _wait_for(words: str, log: Path, is_over: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while words not in log.read_text():
        assert time.monotonic() < deadline and not is_over(), log.read_text()
        time.sleep(0.02)


def _saved_step(log: str, output: Path) -> int:
    """The step that a run says it saved; it is the only one there."""
    (step,) = re.findall(r"asked to stop: saved step (\d+); run again to resume from it", log)
    saved = f"step_{int(step):08d}"
    assert [path.name for path in output.glob("checkpoints/step_*")] == [saved]
    assert f"  checkpoint     {output}/checkpoints/{saved}\n" in log
    return int(step)


def _interrupt_command(log: Path, *arguments: str) -> int:
    """Interrupt ``puzzle-align train`` and all that it started; the exit code."""
    command = [sys.executable, "-m", "puzzle_align.cli.main", "train"]
    with log.open("w") as file:
        run = subprocess.Popen(
            [*command, *arguments],
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": python_path()},
            stderr=file,
            cwd=ROOT,
            start_new_session=True,
        )
        _wait_for("step 3/", log, lambda: run.poll() is not None)
        os.killpg(run.pid, signal.SIGINT)
        return run.wait(PATIENCE_S)


def _interrupt_fork(log: Path, *arguments: str) -> int:
    """Interrupt the same without imports of its own."""
    with running_job(*arguments, log=log, ranks=1) as (run,):
        _wait_for("step 3/", log, lambda: run.poll() is not None)
        run.send_signal(signal.SIGINT)
        return run.wait(PATIENCE_S)


@pytest.mark.parametrize(
    "interrupt", [_interrupt_fork, pytest.param(_interrupt_command, marks=pytest.mark.slow)]
)
def test_the_step_is_saved_and_the_written_config_goes_on_from_it(
    tmp_path: Path,
    train: Command,
    caplog: pytest.LogCaptureFixture,
    interrupt: Callable[..., int],
) -> None:
    log, output = tmp_path / "log", tmp_path / "out"
    assert interrupt(log, *ENDLESS, f"output_dir={output}") == 128 + signal.SIGINT
    said = log.read_text()
    assert said.startswith("puzzle-align ") and "Traceback" not in said
    step, config = _saved_step(said, output), output / "config.yaml"
    assert load_file(config).max_steps == 100000

    code, _, summary = train("--config", str(config), f"max_steps={step + 1}")
    assert code == 0
    assert f"resumed from step {step} of {step + 1}" in caplog.messages
    assert f"  next           puzzle-align convert {output} {output}/hf" in summary
    assert load_file(config).max_steps == step + 1

    caplog.clear()
    code, _, summary = train("--config", str(config))
    assert code == 0 and summary == []
    done = f"finished already: step {step + 1} of {step + 1} is saved; nothing is left to train"
    assert done in caplog.messages
    more = "to train on, raise max_steps; to train anew, choose another output_dir"
    assert more in caplog.messages
    written = config.read_bytes()
    assert train("--config", str(config), "optimizer.lr=1e-3")[0] == 0
    assert config.read_bytes() == written  # with this rate nothing was trained

    assert any("puzzle-align convert" in line for line in caplog.messages)
    caplog.clear()
    named = f"{output}/checkpoints/step_{step + 1:08d}"
    third = (f"output_dir={tmp_path}/third", f"checkpoint.resume={named}")
    assert train("--config", str(config), *third)[0] == 0
    assert done.replace("is saved", f"is in {named}") in caplog.messages
    assert more.replace("choose another output_dir", "leave out checkpoint.resume") in (
        caplog.messages
    )
    assert not any("puzzle-align convert" in line for line in caplog.messages)  # nothing is there

    caplog.clear()
    other = f"checkpoint.dir={tmp_path}/other"
    assert train("--config", str(config), other, "max_steps=1")[0] == 0
    anew = f"starts anew: no step to go on from in {tmp_path}/other;"
    assert any(line.startswith(anew) for line in caplog.messages)
    assert [record["step"] for record in records(output)][-1] == 1


def test_torchrun_s_ranks_save_together(tmp_path: Path) -> None:
    log, output = tmp_path / "log", tmp_path / "out"
    arguments = (*launcher_arguments(2), str(ROOT / "launch" / "train.py"), *ENDLESS)
    environment = {"GLOO_SOCKET_IFNAME": "lo"}
    with log.open("w") as file, tempfile.TemporaryFile("w") as out:
        launcher = fork_launcher(
            tmp_path / "call", (*arguments, f"output_dir={output}"), environment, out, file
        )
        try:
            _wait_for("step 3/", log, lambda: launcher.poll() is not None)
            launcher.send_signal(signal.SIGINT)  # its ranks are in sessions of their own
            assert launcher.wait(PATIENCE_S) == 1  # torchrun's own code, after its own traceback
        finally:
            launcher.kill()
    ours, _, theirs = log.read_text().partition("Traceback")
    assert _saved_step(ours, output) >= 3
    assert "SignalException" in theirs and "puzzle_align" not in theirs


def test_a_second_one_ends_at_once(tmp_path: Path) -> None:
    log, output = tmp_path / "log", tmp_path / "out"
    sizes = ("data.num_synthetic=4500", "global_batch_size=4000", "packing.row_tokens=64")
    with running_job(*ENDLESS, *sizes, f"output_dir={output}", log=log, ranks=1) as (run,):
        _wait_for("eval at step 0", log, lambda: run.poll() is not None)
        run.send_signal(signal.SIGINT)
        _wait_for("stopping: ", log, lambda: run.poll() is not None)
        asked = time.monotonic()
        run.send_signal(signal.SIGINT)
        assert run.wait(PATIENCE_S) == -signal.SIGINT
        assert time.monotonic() - asked < 2.0
    said = log.read_text()
    assert "Traceback" not in said and "step 1/" not in said
    assert not [*output.glob("checkpoints/step_*")]
