"""Stage ppo without a critic: the same numbers under every plan, and no critic anywhere."""

from pathlib import Path

import pytest
import torch

from puzzle_align.config.load import load_job
from puzzle_align.runtime.groups.world import World
from puzzle_align.stages.ppo import open_trainer
from tests.dist.spawn import run_ranks
from tests.jobs import parallel, resolved

# Adam's epsilon is far above the gradients' rounding, as in ``test_ppo_runs``. A prompt's responses
# have different rewards: between equal ones an advantage is rounding, and its sign decides whether
# a ratio is clipped.
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
reward: {function: "tests.dist.split_rewards:mean_code"}
data: {format: synthetic, num_synthetic: 16, max_length: 64}
packing: {row_tokens: 128}
generation: {num_generations: 3, max_new_tokens: 8, min_new_tokens: 2}
ppo: {advantage_estimator: rloo, num_mini_batches: 2}
optimizer: {lr: 0.003, warmup_steps: 0, weight_decay: 0.0, adam_eps: 1.0e-5}
telemetry: {progress: false}
"""
PLANS = {"D2": {"D": 2}, "P2": {"P": 2}, "T2": {"T": 2}}


def _metrics(
    rank: int, world_size: int, folder: str, plans: dict[str, dict[str, int]]
) -> dict[str, list[dict[str, float]]]:
    world = World(rank, world_size, torch.device("cpu"))
    metrics = {}
    for name, sizes in plans.items():
        config = load_job(JOB, [f"output_dir={folder}/{name}", *parallel("actor", **sizes)])
        trainer = open_trainer(resolved(config, world_size), world)
        metrics[name] = [trainer.train_step(step)[0] for step in range(config.max_steps)]
        assert {*trainer.models} <= {"actor"} and "critic" not in trainer.plan.models
    return metrics


def test_every_plan_learns_the_same_without_a_critic(tmp_path: Path) -> None:
    (whole,) = run_ranks(_metrics, 1, str(tmp_path), {"one": {}})
    first, _ = run_ranks(_metrics, 2, str(tmp_path), PLANS)
    assert not {"loss/value_avg", "val/grad_norm"} & {*whole["one"][0]}
    assert whole["one"][0]["policy/grad_norm"] > 0
    for steps in first.values():
        for expected, step in zip(whole["one"], steps, strict=True):
            assert step == pytest.approx({n: expected[n] for n in step}, rel=1e-4, abs=5e-6)
