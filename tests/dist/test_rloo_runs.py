"""Stage ppo without a critic: the same numbers under every plan, and no critic anywhere."""

from pathlib import Path

import pytest
import torch

from puzzle_align.config.load import load_job
from puzzle_align.runtime.groups.world import World
from puzzle_align.stages.ppo import open_trainer
from tests.dist.spawn import run_ranks
from tests.jobs import resolved

# Adam's epsilon is far above the gradients' rounding, as in ``test_ppo_runs``.
JOB = """
stage: ppo
max_steps: 3
global_batch_size: 4
engine: {device: cpu}
actor:
  model:
    config:
      {model_type: llama, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2,
       num_attention_heads: 4, num_key_value_heads: 2, vocab_size: 260,
       max_position_embeddings: 128, initializer_range: 0.2}
reward: {function: "puzzle_align.data.synthetic:vowel_share"}
data: {format: synthetic, num_synthetic: 16, max_length: 64}
packing: {row_tokens: 128}
generation: {num_generations: 3, max_new_tokens: 8, min_new_tokens: 2}
ppo: {advantage_estimator: rloo, num_mini_batches: 2}
optimizer: {lr: 0.003, warmup_steps: 0, weight_decay: 0.0, adam_eps: 1.0e-5}
telemetry: {progress: false}
"""
SIZES = {"D2": (1, 2, 1), "P2": (2, 1, 1), "T2": (1, 1, 2)}


def _metrics(
    rank: int, world_size: int, folder: str, plans: dict[str, tuple[int, int, int]]
) -> dict[str, list[dict[str, float]]]:
    world = World(rank, world_size, torch.device("cpu"))
    names = ("pipeline", "data", "tensor")
    metrics = {}
    for name, sizes in plans.items():
        keys = [
            f"actor.parallel.{axis}{'_model' * (axis != 'data')}_parallel_size={size}"
            for axis, size in zip(names, sizes, strict=True)
        ]
        config = load_job(JOB, [f"output_dir={folder}/{name}", *keys])
        trainer = open_trainer(resolved(config, world_size), world)
        metrics[name] = [trainer.train_step(step)[0] for step in range(config.max_steps)]
        assert {*trainer.models} <= {"actor"} and "critic" not in trainer.plan.models
    return metrics


def test_every_plan_learns_the_same_without_a_critic(tmp_path: Path) -> None:
    (whole,) = run_ranks(_metrics, 1, str(tmp_path), {"one": (1, 1, 1)})
    first, _ = run_ranks(_metrics, 2, str(tmp_path), SIZES)
    assert not {"loss/value_avg", "val/grad_norm"} & {*whole["one"][0]}
    assert whole["one"][0]["policy/grad_norm"] > 0
    for steps in first.values():
        for expected, step in zip(whole["one"], steps, strict=True):
            # A ratio of a token may lie at the clip's edge: one of some thirty, in a mini-batch.
            clipped = step.pop("policy/clipfrac_avg"), expected["policy/clipfrac_avg"]
            assert clipped[0] == pytest.approx(clipped[1], abs=0.05)
            others = {name: expected[name] for name in step}
            assert step == pytest.approx(others, rel=1e-4, abs=5e-6)
