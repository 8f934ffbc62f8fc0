"""Dropout of adapters in PPO, where another model on the same ranks draws, too."""

from importlib import import_module
from pathlib import Path

import torch

from puzzle_align.config.load import load_job
from puzzle_align.runtime.groups.world import World
from tests.dist.spawn import run_ranks
from tests.dist.test_lora_roles import COMMON, PPO
from tests.dist.test_lora_runs import save_base
from tests.jobs import parallel, problems_of, resolved

JOB = f"{COMMON}{PPO}reward: {{function: 'puzzle_align.data.synthetic:vowel_share'}}\n"
DROPPED = "{r: 4, lora_alpha: 16, lora_dropout: 0.3}"
MODELS = (
    "global_batch_size=6",
    f"actor.lora={DROPPED}",
    "critic.base=actor",
    f"critic.lora={DROPPED}",
    *parallel("actor", T=2),
    # The critic's pipeline ranks have one layer and three: they draw unequally often.
    *parallel("critic", P=2),
    "critic.parallel.pipeline_layers=[1,3]",
)


def _run(rank: int, world_size: int, folder: Path) -> list[dict[str, torch.Tensor]]:
    """By iteration, those of the actor's adapters that tensor ranks hold alike."""
    paths = (f"actor.model.path={folder}/base", f"output_dir={folder}/out")
    config = load_job(JOB, [*paths, *MODELS])
    assert not problems_of(config, world_size)
    trainer = import_module("puzzle_align.stages.ppo").open_trainer(
        resolved(config, world_size), World(rank, world_size, torch.device("cpu"))
    )
    found = []
    for step in range(trainer.num_steps):
        trainer.train_step(step)
        found.append(
            {
                name: parameter.detach().clone()
                for chunk in trainer.run.contexts["actor", "train"].chunks
                for name, parameter in chunk.named_parameters()
                if ".lora." in name and not getattr(parameter, "tensor_model_parallel", False)
            }
        )
    return found


def test_tensor_ranks_drop_alike_whatever_other_models_draw(tmp_path: Path) -> None:
    save_base(tmp_path)
    for one, other in zip(*run_ranks(_run, 2, tmp_path), strict=True):
        assert one and one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)
