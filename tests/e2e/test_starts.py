"""A resumed run goes on with the weights that it began with, wherever they lie by now."""

import json
import os
import platform
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from puzzle_align.config.load import find_config, load_file
from puzzle_align.config.saved import find_checkpoint
from puzzle_align.layout.hf_config import from_hf_config
from puzzle_align.layout.weights import hf_shapes
from puzzle_align.stages.weights import find_starts
from tests.checkpoints import flip
from tests.dist.spawn import run_ranks
from tests.e2e.conftest import Command
from tests.e2e.launch import SMALL
from tests.jobs import resolved
from tests.specs import CONFIG

MODEL = {**CONFIG, "hidden_size": 32}
SAVED = "run/checkpoints/*/job.json"
CHANGED = "model.layers.3.mlp.down_proj.weight"


def _model(folder: Path, seed: int = 0, changed: int = 0, **config: Any) -> Path:
    """A model of a seed, one of its tensors of another."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**MODEL, **config}))
    tensors = {}
    shapes = hf_shapes(from_hf_config({**MODEL, **config}, ""))
    for number, (name, shape) in enumerate(shapes.items()):
        own = 100 * (changed if name == CHANGED else seed) + number
        drawn = torch.randn(shape, generator=torch.Generator().manual_seed(own))
        tensors[name] = 0.02 * drawn + (1 if len(shape) == 1 else 0)
    save_file(tensors, folder / "model.safetensors")
    return folder


def _job(output: Path, steps: int, role: str, model: Path) -> list[str]:
    own = (f"{role}.model.path={model}", f"actor.model.random_weights={role != 'actor'}".lower())
    return [*SMALL, *own, "tokenizer.path=byte", f"output_dir={output}", f"max_steps={steps}"]


@pytest.mark.parametrize("role", ["reference", "actor"])
def test_a_frozen_model_is_the_one_that_the_run_began_with(
    role: str, tmp_path: Path, train: Command
) -> None:
    """``role``: who has the model; the actor's is also that of the reference."""
    first, moved, output = _model(tmp_path / "first"), tmp_path / "moved", tmp_path / "run"
    assert train(*_job(output, 1, role, first))[0] == 0
    first.rename(moved)
    resumed = _job(output, 2, role, moved)
    assert train(*resumed)[0] == 0
    saved = find_checkpoint(output)
    assert saved.step == 2

    begun = f"error: {role}.model: the reference in {saved.path} began with "
    cure = "put it back, or start anew with another output_dir"
    changes: tuple[tuple[dict[str, Any], str], ...] = (
        ({"changed": 1}, f"other weights than are in {moved} now: {cure}"),
        ({"rms_norm_eps": 1e-5}, f"rms_norm_eps=1e-06, and here is 1e-05: {cure}"),
    )
    for change, told in changes:
        line = begun + told
        if role == "actor" and "rms_norm_eps" in change:
            line = f"error: {saved.path} is of another model than {role}.model: "
        _model(moved, **change)
        code, _, shown = train(*resumed)
        assert code == 2
        assert len(shown) == 1 and shown[0].startswith(line), shown
    _model(moved)
    weights = moved / "model.safetensors"
    start = 8 + int.from_bytes(weights.read_bytes()[:8], "little")
    for place in (start, start + 77_777, weights.stat().st_size - 1):
        flip(weights, place)
        code, _, shown = train(*resumed)
        assert code == 2 and len(shown) == 1, shown
        assert shown[0] == f"{begun}other weights than are in {moved} now: {cure}"
        flip(weights, place)
    assert train(*resumed)[0] == 0


def test_a_trained_model_needs_its_start_no_more(tmp_path: Path, train: Command) -> None:
    """But a path to other weights is no way to train those in a run that is under way."""
    head = {"architectures": ["LlamaForSequenceClassification"], "num_labels": 1}
    first, other = (_model(tmp_path / str(n), seed=n, **head) for n in (1, 2))
    own = ("--config", "reward_tiny", "packing.row_tokens=64", "data.max_length=64")
    few = ("data.num_synthetic=64", "global_batch_size=16", "tokenizer.path=byte")
    common = (*own, *few, f"output_dir={tmp_path}/run")

    def ends(path: Path, steps: int) -> tuple[int, list[str], list[str]]:
        return train(*common, f"reward.model.path={path}", f"max_steps={steps}")

    assert ends(first, 1)[0] == 0
    code, _, (line,) = ends(other, 2)
    assert code == 2 and line.startswith("error: reward.model: the reward in ")
    assert f"began with other weights than are in {other} now: " in line
    _model(first, seed=2, **head)
    assert ends(first, 2)[0] == 0
    # Nor is what lies there by now what the run began with, however often it was saved since.
    begun, later = (json.loads(file.read_text()) for file in sorted(tmp_path.glob(SAVED)))
    assert (begun["step"], later["step"]) == (1, 2)
    assert later["starts"] == begun["starts"] and later["job_id"] == begun["job_id"]


def test_another_model_on_another_node_s_disk_is_refused(tmp_path: Path) -> None:
    for number, change in enumerate((0, 0, 1)):
        _model(tmp_path / f"node{number}" / "model", changed=change)
    assert run_ranks(_as_nodes, 2, tmp_path, (0, 1)) == [None, None]
    told = run_ranks(_as_nodes, 2, tmp_path, (0, 2))
    wrong = f"on node {platform.node()}: reference.model.path: model is another model there than"
    assert told == [f"{wrong} on rank 0's node: copy it again"] * 2


def _as_nodes(rank: int, world_size: int, folder: Path, nodes: tuple[int, int]) -> str | None:
    """What is wrong with the models of two nodes, each in the folder that a node's ranks are in."""
    os.environ["LOCAL_RANK"] = "0"
    os.chdir(folder / f"node{nodes[rank]}")
    keys = ["reference.model.path=model", "actor.model.config.hidden_size=32"]
    config = load_file(find_config("dpo_tiny"), keys)
    try:
        find_starts(resolved(config, world_size))
    except ValueError as error:
        return str(error)
    return None
