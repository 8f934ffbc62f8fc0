"""Dropout of adapters in PPO, where another model on the same ranks draws, too."""

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from puzzle_align.config.load import load_job
from puzzle_align.runtime.groups.world import World
from tests.dist.spawn import run_ranks
from tests.dist.test_lora_runs import save_base
from tests.jobs import parallel, problems_of, resolved

PPO = """
stage: ppo
seed: 3
engine: {device: cpu}
tokenizer: {path: byte}
optimizer: {lr: 0.01, warmup_steps: 0}
telemetry: {progress: false, tensorboard: false}
packing: {row_tokens: 64}
global_batch_size: 6
max_steps: 2
data: {format: synthetic, num_synthetic: 32, max_length: 48}
generation: {max_new_tokens: 12, min_new_tokens: 2, decode_batch_size: 2}
ppo: {num_mini_batches: 2, kl_coef: 0.1}
reward: {function: "puzzle_align.data.synthetic:vowel_share"}
"""
DROPPED = "{r: 4, lora_alpha: 16, lora_dropout: 0.3}"
RUNS = {
    # The critic's pipeline ranks have one layer and three: they draw unequally often.
    "uneven critic": [
        *parallel("actor", T=2),
        *parallel("critic", P=2),
        "critic.parallel.pipeline_layers=[1,3]",
    ],
    "sequential": [*parallel("actor", P=2), "placement.learn=sequential"],
    "time_shared": [*parallel("actor", P=2), "placement.learn=time_shared"],
}


def _run(rank: int, world_size: int, folder: Path, name: str) -> list[Any]:
    """By iteration, the metrics, and the actor's adapters that tensor ranks hold alike."""
    base = [f"actor.model.path={folder}/base", f"actor.lora={DROPPED}", "critic.base=actor"]
    own = [f"critic.lora={DROPPED}", f"output_dir={folder / name}"]
    config = load_job(PPO, [*base, *own, *RUNS[name]])
    assert not problems_of(config, world_size)
    trainer = import_module("puzzle_align.stages.ppo").open_trainer(
        resolved(config, world_size), World(rank, world_size, torch.device("cpu"))
    )
    found = []
    for step in range(trainer.num_steps):
        metrics, _ = trainer.train_step(step)
        whole = {
            name: parameter.detach().clone()
            for chunk in trainer.run.contexts["actor", "train"].chunks
            for name, parameter in chunk.named_parameters()
            if ".lora." in name and not getattr(parameter, "tensor_model_parallel", False)
        }
        found.append((metrics, whole))
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("dropout")
    save_base(path)
    return path


def test_tensor_ranks_drop_alike_whatever_other_models_draw(folder: Path) -> None:
    first, second = run_ranks(_run, 2, folder, "uneven critic")
    for (_, one), (_, other) in zip(first, second, strict=True):
        assert one and one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_models_that_share_time_drop_as_one_after_the_other(folder: Path) -> None:
    shared, in_turn = (run_ranks(_run, 2, folder, name) for name in ("time_shared", "sequential"))
    for one, other in zip(shared, in_turn, strict=True):
        assert [metrics for metrics, _ in one] == [metrics for metrics, _ in other]
