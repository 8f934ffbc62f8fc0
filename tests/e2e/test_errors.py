"""Mistakes and faults as a user sees them: one line that says where it is and what to do.

A mistake ends a job before training; a disk that fails amid a run does not end it with exit code 0.
"""

import json
import re
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from puzzle_align.layout.hf_config import from_hf_config
from puzzle_align.layout.weights import hf_shapes
from tests.e2e.launch import SMALL, launched, run_job
from tests.specs import CONFIG

GOOD = {"prompt": "a:", "chosen": "b", "rejected": "c"}
MODEL = {**CONFIG, "hidden_size": 32}
OWN_DATA = ("data.format=auto", "actor.model.random_weights=true", "tokenizer.path=byte")


def _config(folder: Path, text: str) -> list[str]:
    (folder / "job.yaml").write_text(text)
    return ["--config", str(folder / "job.yaml")]


def _data(folder: Path, *lines: str) -> list[str]:
    (folder / "pairs.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return [*SMALL, *OWN_DATA, f"data.train={folder}/pairs.jsonl"]


def _weights(folder: Path, *missing: str, **shapes: tuple[int, ...]) -> list[str]:
    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(MODEL))
    tensors = {
        name: torch.zeros(shapes.get(name.split(".")[-2], shape))
        for name, shape in hf_shapes(from_hf_config(MODEL, "test")).items()
        if name not in missing
    }
    save_file(tensors, model / "model.safetensors")
    return [*SMALL, f"actor.model.path={model}", "tokenizer.path=byte"]


def _unfinished(folder: Path) -> list[str]:
    (folder / "run" / "checkpoints" / ".saving_step_00000001_0").mkdir(parents=True)
    return [*SMALL, f"actor.model.path={folder}/run"]


def _empty_checkpoint(folder: Path) -> list[str]:
    (folder / "step_00000001").mkdir()
    (folder / "step_00000001" / "job.json").write_text("{}")
    return [*SMALL, f"actor.model.path={folder}"]


def _output_in_a_file(folder: Path) -> list[str]:
    (folder / "file").touch()
    return [*SMALL, f"output_dir={folder}/file/run"]


NAME = "model.layers.1.mlp.up_proj.weight"


MISTAKES: dict[str, tuple[Callable[[Path], list[str]], str]] = {
    "unknown key": (
        lambda at: _config(at, "seed: 1\ndpo:\n  betta: 0.1\n"),
        r"@/job.yaml:3: unknown key 'dpo.betta'; the nearest known one is 'dpo.beta'",
    ),
    "broken JSON": (
        lambda at: _data(at, json.dumps(GOOD), '{"prompt": "a", '),
        r"@/pairs.jsonl:2: invalid JSON \(.*\); write one JSON object a line, or leave bad records "
        r"out with data.on_error=skip",
    ),
    "small vocabulary": (
        lambda at: [*SMALL, "actor.model.config.vocab_size=100"],
        r"tokenizer.path: its padding token is 256, the vocab_size of actor.model is 100: give the "
        r"model's own tokenizer",
    ),
    "no finished checkpoint": (
        _unfinished,
        r"actor.model.path: no Hugging Face model \(config.json\) there, and as a checkpoint: @/run"
        r": no checkpoint there is finished; wait for one, or name another",
    ),
    "a checkpoint of no job": (
        _empty_checkpoint,
        r"actor.model.path: no Hugging Face model \(config.json\) there, and as a checkpoint: "
        r"checkpoint @/step_00000001 is damaged or incomplete \(checksums.json is missing\): "
        r"take another",
    ),
    "missing tensor": (
        lambda at: _weights(at, NAME),
        rf"actor.model.path: @/model: tensor {NAME} is missing from the weights: .*",
    ),
    "mis-shaped tensor": (
        lambda at: _weights(at, q_proj=(16, 32)),
        r"actor.model.path: @/model/model.safetensors: tensor model.layers.0.self_attn.q_proj."
        r"weight has shape \(16, 32\), config.json asks for \(32, 32\): .*",
    ),
    "output": (
        _output_in_a_file,
        r"output_dir: @/file/run cannot be made: @/file is a file; name another folder.*",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_line_before_training(name: str, tmp_path: Path, train) -> None:
    arguments, line = MISTAKES[name]
    asked = arguments(tmp_path)
    if not any(argument.startswith("output_dir=") for argument in asked):
        asked.append(f"output_dir={tmp_path}/out")
    code, _, shown = train(*asked)
    assert code == 2
    assert len(shown) == 1, shown
    assert re.fullmatch(f"error: {line.replace('@', re.escape(str(tmp_path)))}", shown[0]), shown[0]
    assert not (tmp_path / "out" / "metrics.jsonl").exists()


# What is wrong makes no difference to how the ranks say it.
@pytest.mark.parametrize(
    "name", ["broken JSON", pytest.param("missing tensor", marks=pytest.mark.slow)]
)
def test_two_ranks_say_it_once_and_first(name: str, tmp_path: Path) -> None:
    arguments, line = MISTAKES[name]
    job = launched(*arguments(tmp_path), f"output_dir={tmp_path}/out")
    assert job.returncode != 0
    shown = job.stderr.splitlines()
    pattern = f"error: {line.replace('@', re.escape(str(tmp_path)))}"
    place = next(n for n, text in enumerate(shown) if text.startswith("error"))
    assert re.fullmatch(pattern, shown[place]), shown[place]
    assert shown[0].endswith("on 2 ranks: starting")
    assert not any("torch" in text for text in shown[:place])  # the launcher's words come later
    assert sum(text.startswith("error") for text in shown) == 1
    assert "[rank" not in job.stderr  # no traceback of ours
    closing = shown[shown.index("Root Cause (first observed failure):") :]
    assert any(re.search(f"traceback : {pattern}", text) for text in closing)


CURE = "free space or mend the disk there, and run the same command again"


def test_metrics_that_cannot_be_written_end_the_job_on_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "metrics.jsonl").symlink_to("/dev/full")
    job = run_job(*SMALL, f"output_dir={tmp_path}/out", "max_steps=2", timeout=100.0)
    path = tmp_path / "out" / "metrics.jsonl"
    assert job.returncode == 2
    last = f"error: {path} cannot be written (Invalid argument): {CURE}"
    assert job.stderr.splitlines()[-1] == last and job.stderr.count("error") == 1


@pytest.mark.parametrize("deleted", ["out", "out/checkpoints"])
def test_a_folder_that_is_deleted_ends_the_job(tmp_path: Path, train, deleted: str) -> None:
    out = tmp_path / "out"

    def delete() -> None:
        while not (out / "metrics.jsonl").exists() or not (out / "metrics.jsonl").stat().st_size:
            time.sleep(0.01)
        while (tmp_path / deleted).exists():
            shutil.rmtree(tmp_path / deleted, ignore_errors=True)

    threading.Thread(target=delete, daemon=True).start()
    keys = ("max_steps=5000", "checkpoint.save_every=20", "telemetry.log_every=1")
    code, _, lines = train(*SMALL, f"output_dir={out}", *keys)
    assert code == 2
    assert lines[-1].startswith(f"error: {tmp_path / deleted}")
    assert "could not be written" in lines[-1] or lines[-1].endswith(CURE)
    assert "No such file or directory" in lines[-1]
