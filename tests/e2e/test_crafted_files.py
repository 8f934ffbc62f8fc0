"""Files made to run code: none does, in any place, whoever reads it, nor is anyone asked.

Of checkpoints the checksums agree with what was hidden, or there are none and none are asked for:
so the bytes are read. Of tokenizers it is what comes with them.
"""

import contextlib
import io
import json
import os
import pickle
import pty
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from puzzle_align.runtime.checkpoint.metadata import read_metadata
from tests import fork_server
from tests.checkpoints import reseal
from tests.command import main
from tests.e2e.conftest import close_groups
from tests.e2e.launch import SMALL, run_job
from tests.e2e.test_ppo_cli import QUIET
from tests.unit.test_tokenize import CHATML, save_bpe

STEP = "checkpoints/step_00000001"
SHARDS = "__0_0.distcp"
WEIGHT = "actor.decoder.final_layernorm.weight"  # in a shard
PLACES = (".metadata", "common.pt", WEIGHT)
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
    folder = tmp_path_factory.mktemp("run")
    done = run_job(*_job(folder), "max_steps=1", ranks=1)
    assert done.returncode == 0, done.stderr
    return folder


def _job(output: Path) -> tuple[str, ...]:
    return (*SMALL, *QUIET, f"output_dir={output}")


def _hide(step: Path, place: str, mark: Path) -> None:
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


def _say_yes(has_terminal: bool) -> None:
    """Answer whatever is asked at a terminal, or have none."""
    ours, theirs = pty.openpty()
    os.write(ours, b"y\n" * 99)
    os.dup2(theirs if has_terminal else os.open(os.devnull, os.O_RDONLY), 0)
    sys.stdin = os.fdopen(0)
    assert sys.stdin.isatty() == has_terminal


def _in_fork(folder: Path, work: Callable[..., None], *arguments: Any) -> str:
    """All that ``work`` shows, done in a process of its own."""
    call, log = folder / "call", folder / "log"
    environment = {"GLOO_SOCKET_IFNAME": "lo"}
    fork_server.write_call(call, work, *arguments, environment=environment)
    with log.open("w") as out:
        code = fork_server.fork(0, call, (out.fileno(), out.fileno())).wait()
    assert code == 0, log.read_text()
    return log.read_text()


def _use_all(folder: Path, has_terminal: bool) -> None:
    """Use every checkpoint with every command; write ``[place, command, exit code, errors]``."""
    _say_yes(has_terminal)
    found = []
    for number, place in enumerate(PLACES):
        own = folder / f"{number}"
        start = f"actor.model.path={own}/{STEP}"
        arguments = {
            "generate": ("generate", "--model", f"{own}", "--prompt", "a", *SHORT),
            "convert": ("convert", f"{own}", f"{own}/hf"),
            "start": ("train", *_job(own / "started"), "max_steps=1", start),
            "inspect": ("inspect", "reshard", *_job(own), start),
            "resume": ("train", *_job(own), "max_steps=2"),
        }
        for command in COMMANDS:
            with contextlib.redirect_stderr(io.StringIO()) as errors:
                code = main(arguments[command])
            close_groups()
            found.append((place, command, code, errors.getvalue()))
    (folder / "found").write_text(json.dumps(found))


@pytest.mark.parametrize("has_terminal", [False, True])
def test_no_code_in_a_checkpoint_is_run(run: Path, tmp_path: Path, has_terminal: bool) -> None:
    for number, place in enumerate(PLACES):
        step = shutil.copytree(run, tmp_path / f"{number}") / STEP
        _hide(step, place, tmp_path / "mark")
        reseal(step)
    _in_fork(tmp_path, _use_all, tmp_path, has_terminal)
    assert not (tmp_path / "mark").exists()
    found = json.loads((tmp_path / "found").read_text())
    assert len(found) == len(PLACES) * len(COMMANDS)
    for place, command, code, errors in found:
        (line,) = [text for text in errors.splitlines() if text.startswith("error: ")]
        assert code == 2 and "Traceback" not in errors, errors
        expected = ("nothing moves in this job",) if command == "inspect" else SEEN
        assert any(words in line for words in expected), (place, command, line)


def _use_tokenizer(folder: str, has_terminal: bool) -> None:
    """Run every command on the folder, at a terminal or none."""
    _say_yes(has_terminal)
    for arguments in (
        ["train", "--validate", "--config", "dpo_tiny", f"tokenizer.path={folder}"],
        ["generate", "--model", folder, "--prompts", f"{folder}/prompts.jsonl"],
        ["convert", folder, f"{folder}/checkpoint", "--to-checkpoint"],
    ):
        try:
            print("exit code", main(arguments))
        except SystemExit as error:
            print("exit code", error.code)


@pytest.mark.parametrize("has_terminal", [False, True])
def test_code_beside_a_tokenizer_is_not_run_and_nobody_is_asked(tmp_path, has_terminal) -> None:
    path = Path(save_bpe(tmp_path / "model", template=CHATML))
    mark = tmp_path / "mark"
    code = f"open({str(mark)!r}, 'w')\nclass Own:\n    pass\n"
    for name in ("own.py", "tokenization_own.py"):
        (path / name).write_text(code)
    (path / "prompts.jsonl").write_text('{"prompt": "a"}\n')
    crafted = {"auto_map": {"AutoTokenizer": ["own.Own", "own.Own"], "AutoConfig": "own.Own"}}
    for name in ("tokenizer_config.json", "config.json"):
        file = path / name
        found = json.loads(file.read_text()) if file.exists() else {"model_type": "own"}
        file.write_text(json.dumps({**found, **crafted, "tokenizer_class": "OwnTokenizer"}))
    (path / "tokenizer.json").unlink()
    shown = _in_fork(tmp_path, _use_tokenizer, str(path), has_terminal)
    assert not mark.exists()
    assert shown.count("exit code 2") == 3, shown
    assert "Traceback" not in shown and "[y/N]" not in shown
    assert f"error: tokenizer.path={path}: no Hugging Face tokenizer there" in shown
