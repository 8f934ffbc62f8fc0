"""Checkpoints made to run a command: none does, in any place, whoever reads it and asks.

The checksums agree with what was hidden, or there are none and none are asked for: so the bytes are
read.
"""

import contextlib
import io
import json
import os
import pickle
import pty
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from puzzle_align.runtime.checkpoint.metadata import read_metadata
from puzzle_align.runtime.groups.world import shutdown_distributed
from tests import fork_server
from tests.checkpoints import reseal
from tests.command import main
from tests.e2e.launch import SMALL, run_job
from tests.e2e.test_ppo_cli import QUIET

STEP = "checkpoints/step_00000001"
SHARDS = "__0_0.distcp"
RANDOM, WEIGHT = "actor.random/shard_0_1", "actor.decoder.final_layernorm.weight"  # in a shard
PLACES = (".metadata", "common.pt", RANDOM, WEIGHT)
COMMANDS = ("generate", "convert", "start", "inspect", "resume")  # resuming saves another
SHORT = ("generation.max_new_tokens=2",)
SEEN = ("holds code, or an unknown class", "holds code, or what is no plain value", "does not load")


class _Code:
    """Unpickled without restraint, it runs a command."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.system, (f"touch '{self.mark}'",)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's folder, of one step."""
    folder = tmp_path_factory.mktemp("run")
    done = run_job(*_job(folder), "max_steps=1", ranks=1)
    assert done.returncode == 0, done.stderr
    return folder


def _job(output: Path) -> tuple[str, ...]:
    return (*SMALL, *QUIET, f"output_dir={output}")


def _hide(step: Path, place: str, mark: Path) -> None:
    """Hide code in a place of a checkpoint."""
    code = pickle.dumps(_Code(mark))
    if place == ".metadata":
        metadata = pickle.loads((step / place).read_bytes())
        metadata.planner_data = _Code(mark)
        (step / place).write_bytes(pickle.dumps(metadata))
    elif place == "common.pt":
        torch.save({"actor": _Code(mark)}, step / place)
    else:
        entries = read_metadata((step / ".metadata").read_bytes()).storage_data.items()
        (info,) = [info for index, info in entries if index.fqn == place]
        data = bytearray((step / SHARDS).read_bytes())
        data[info.offset : info.offset + info.length] = code.ljust(info.length, b"\0")
        (step / SHARDS).write_bytes(data)


def _use_all(folder: Path, has_terminal: bool, verifies: bool) -> None:
    """Use every checkpoint with every command; write ``[place, command, exit code, errors]``."""
    ours, theirs = pty.openpty()
    os.write(ours, b"y\n" * 99)
    os.dup2(theirs if has_terminal else os.open(os.devnull, os.O_RDONLY), 0)
    sys.stdin = os.fdopen(0)
    assert sys.stdin.isatty() == has_terminal
    verify = f"checkpoint.verify={str(verifies).lower()}"
    found = []
    for number, place in enumerate(PLACES):
        own = folder / f"{number}"
        start = f"actor.model.path={own}/{STEP}"
        arguments = {
            "generate": ("generate", "--model", f"{own}", "--prompt", "a", *SHORT, verify),
            "convert": ("convert", f"{own}", f"{own}/hf", *(() if verifies else ("--no-verify",))),
            "start": ("train", *_job(own / "started"), "max_steps=1", start, verify),
            "inspect": ("inspect", "reshard", *_job(own), start, verify),
            "resume": ("train", *_job(own), "max_steps=2", verify),
        }
        for command in COMMANDS:
            with contextlib.redirect_stderr(io.StringIO()) as errors:
                code = main(arguments[command])
            if dist.is_initialized():  # a process that fails ends with its groups open
                shutdown_distributed()
            found.append((place, command, code, errors.getvalue()))
    (folder / "found").write_text(json.dumps(found))


def test_the_code_would_run(tmp_path: Path) -> None:
    pickle.loads(pickle.dumps(_Code(tmp_path / "mark")))
    assert (tmp_path / "mark").exists()


@pytest.mark.parametrize(("has_terminal", "verifies"), [(False, True), (True, True), (True, False)])
def test_no_code_in_a_checkpoint_is_run(
    run: Path, tmp_path: Path, has_terminal: bool, verifies: bool
) -> None:
    for number, place in enumerate(PLACES):
        step = shutil.copytree(run, tmp_path / f"{number}") / STEP
        _hide(step, place, tmp_path / "mark")
        if verifies:
            reseal(step)
        else:
            (step / "checksums.json").unlink()
    call, log = tmp_path / "call", tmp_path / "log"
    how = (tmp_path, has_terminal, verifies)
    fork_server.write_call(call, _use_all, *how, environment={"GLOO_SOCKET_IFNAME": "lo"})
    with log.open("w") as out:
        process = fork_server.fork(0, call, (out.fileno(), out.fileno()))
        assert process.wait() == 0, log.read_text()
    assert not (tmp_path / "mark").exists()
    found = json.loads((tmp_path / "found").read_text())
    assert len(found) == len(PLACES) * len(COMMANDS)
    for place, command, code, errors in found:
        if command == "inspect":  # of a job in which nothing moves
            assert "Traceback" not in errors, errors
        elif place == RANDOM and command != "resume":
            assert code == 0, (command, errors)  # it has no use for it, and does not read it
        else:
            (line,) = [text for text in errors.splitlines() if text.startswith("error: ")]
            assert code == 2 and "Traceback" not in errors, errors
            assert any(seen in line for seen in SEEN), (place, command, line)
