"""Reward-model runs on one and two ranks: layouts, plans, margins, centring, resuming.

All runs of a world size share one spawn; every loss is a list over steps.
"""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from puzzle_align.config.job import JobConfig
from puzzle_align.config.load import load_job
from puzzle_align.data import synthetic
from puzzle_align.runtime.groups.collectives import barrier
from puzzle_align.runtime.groups.world import World
from puzzle_align.stages.reward import RewardTrainer
from tests.bounds import LOSS_BOUND
from tests.dist.spawn import asked, marked, run_ranks
from tests.jobs import resolved, run_to_end
from tests.metrics import numbers

NUM_STEPS, SAVED = 4, 2
JOB = """
stage: reward
global_batch_size: 8
max_steps: 4
engine: {device: cpu}
reward:
  model:
    config:
      {model_type: llama, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 4,
       num_attention_heads: 4, num_key_value_heads: 2, vocab_size: 260,
       max_position_embeddings: 64, initializer_range: 0.2}
data: {eval_fraction: 0.25, max_length: 64}
packing: {row_tokens: 64}
optimizer: {lr: 0.001, warmup_steps: 2}
checkpoint: {save_every: 2, keep_last: 0}
telemetry: {progress: false, tensorboard: false}
"""
METRICS = ("loss", "accuracy", "margin", "min_reward", "mean_reward", "max_reward")
P2 = ["reward.parallel.pipeline_model_parallel_size=2"]
T2 = ["reward.parallel.tensor_model_parallel_size=2"]
RUNS = {
    1: {
        "alone": ["packing.layout=padded", "packing.row_tokens=32"],
        "shared": [],
        "still": ["optimizer.lr=0"],
        "no margins": ["optimizer.lr=0"],
        "one pair a step": [
            "global_batch_size=1",
            *("data.shuffle=false", "data.eval_fraction=0", "data.eval=@/plain.jsonl"),
            "reward_loss.center_rewards_coefficient=0.1",
        ],
    },
    2: {
        "data": [],
        "pipeline": P2,
        "chunks": [*P2, "reward.parallel.virtual_pipeline_model_parallel_size=2"],
        "tensor": T2,
        "sequence": [*T2, "reward.parallel.sequence_parallel=true"],
        "recompute": [*T2, "reward.parallel.recompute=full"],
        "paired": ["packing.layout=paired"],
        "padded": ["packing.layout=padded"],
        "not packed": ["packing.enabled=false"],
        "dataset scope": ["packing.scope=dataset"],
        "sharded optimizer": ["optimizer.use_distributed_optimizer=true"],
    },
}
OTHERS = ("still", "no margins", "one pair a step", "dataset scope")
# What DPO's runs have, too: the head of a reward model is a part of its last chunk.
SLOW = ("chunks", "recompute", "padded", "not packed", "sharded optimizer")
SAME = marked((n for n in {**RUNS[1], **RUNS[2]} if n not in ("alone", *OTHERS)), SLOW)
RESUMED = ["pipeline", *(pytest.param(n, marks=pytest.mark.slow) for n in ("data", "tensor"))]
Numbers = dict[str, list[dict[str, float]]]


def _data(folder: Path) -> None:
    """48 pairs, every third with a margin of 1/2; and the same pairs without margins."""
    rows = [dict(zip(("prompt", "chosen", "rejected"), p, strict=True)) for p in _pairs()]
    with_margins = [{**r, "margin": 0.5} if n % 3 == 0 else r for n, r in enumerate(rows)]
    for name, content in (("pairs", with_margins), ("plain", rows)):
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, content)))


def _pairs() -> list[tuple[str, str, str]]:
    """Pairs of uneven lengths."""
    pairs = synthetic.generate(48, seed=1)
    return [(p, c * (1 + n % 5), r * (1 + n % 3)) for n, (p, c, r) in enumerate(pairs)]


def _job(folder: Path, name: str, *overrides: str) -> JobConfig:
    source = "plain" if name == "no margins" else "pairs"
    own = [f"data.train={folder}/{source}.jsonl", f"data.cache_dir={folder}/cache"]
    return load_job(JOB, [*own, f"output_dir={folder}/{name}", *overrides])


def _all_runs(
    rank: int, world_size: int, place: Path, names: set[str], resumed: list[str]
) -> dict[str, Any]:
    world = World(rank, world_size, torch.device("cpu"))
    steps: Numbers = {}
    evals: dict[str, dict[str, float]] = {}
    for name, overrides in RUNS[world_size].items():
        if name not in names:
            continue
        job = _job(place, name, *(key.replace("@", str(place)) for key in overrides))
        trainer = RewardTrainer(resolved(job, world.size), world)
        steps[name] = [trainer.train_step(step)[0] for step in range(NUM_STEPS)]
        evals[name] = trainer.evaluate() or {}
    for name in resumed:
        _interrupted(world, place, name)
    return {"steps": steps, "evals": evals}


def _interrupted(world: World, folder: Path, name: str) -> None:
    """The run through the loop, whole; and again from its checkpoint in the middle."""
    whole, resumed = (f"{name} {kind}" for kind in ("whole", "resumed"))
    for run in (whole, resumed):
        job = _job(folder, run, *RUNS[2][name])
        if run == resumed and world.rank == 0:
            saved = f"checkpoints/step_{SAVED:08d}"
            shutil.copytree(folder / whole / saved, folder / run / saved)
        barrier()
        run_to_end(RewardTrainer(resolved(job, world.size), world))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("reward")
    _data(path)
    return path


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest, folder: Path) -> dict[str, Any]:
    resumed = sorted(asked(request, "resumed"))
    names = {*OTHERS, "alone", "data", *resumed, *asked(request, "name")}
    (alone,) = run_ranks(_all_runs, 1, folder, names, [])
    first, second = run_ranks(_all_runs, 2, folder, names, resumed)
    assert first == second  # every rank tells the same
    return {what: {**alone[what], **first[what]} for what in ("steps", "evals")}


def test_metrics_are_trl_s(found) -> None:
    for name, steps in found["steps"].items():
        for metrics in steps:
            others = {"num_tokens", "grad_norm", "learning_rate"}
            assert metrics.keys() == {*METRICS, *others}, name
            assert metrics["min_reward"] <= metrics["mean_reward"] <= metrics["max_reward"]
            assert metrics["grad_norm"] > 0
        assert tuple(found["evals"][name]) == (*METRICS, "num_tokens")


@pytest.mark.parametrize("name", SAME)
def test_plans_and_layouts_train_alike(found, name: str) -> None:
    """Relative 1e-5 in the loss, of one sequence at a time on one rank.

    The norm to 1e-4, as steps enlarge what gradients differ by; single rewards as logits, to 1e-4
    of their size, and near zero to 1e-5. No difference was seen over a thirtieth of these.
    """
    steps, truth = found["steps"][name], found["steps"]["alone"]
    for metrics, wanted in zip(steps, truth, strict=True):
        assert metrics["loss"] == pytest.approx(wanted["loss"], rel=LOSS_BOUND)
        assert metrics["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=1e-4)
        for metric in METRICS:
            assert metrics[metric] == pytest.approx(wanted[metric], rel=1e-4, abs=1e-5), metric
    for metric, value in found["evals"]["alone"].items():
        assert found["evals"][name][metric] == pytest.approx(value, rel=1e-4, abs=1e-5), metric


def test_a_pair_s_loss_is_of_its_rewards_its_margin_and_their_centre(found) -> None:
    """The first four pairs, of which the first and the last have a margin of 1/2."""
    metrics = found["steps"]["one pair a step"]
    for step, margin in zip(metrics, (0.5, 0.0, 0.0, 0.5), strict=True):
        short, rewards = margin - step["margin"], 2 * step["mean_reward"]
        assert abs(rewards) > 0.1
        assert step["loss"] == pytest.approx(math.log1p(math.exp(short)) + 0.1 * rewards**2)


def test_margins_raise_the_loss_of_the_same_rewards(found) -> None:
    """In training and held out; each of a third of the pairs by at most its margin of 1/2."""
    asked, plain = (
        [*found["steps"][name], found["evals"][name]] for name in ("still", "no margins")
    )
    raised = 0.0
    for with_margins, without in zip(asked, plain, strict=True):
        for metric in METRICS[1:]:
            assert with_margins[metric] == without[metric], metric
        assert with_margins["loss"] > without["loss"]
        raised += with_margins["loss"] - without["loss"]
    assert raised / len(asked) < 0.25


@pytest.mark.parametrize("resumed", RESUMED)
def test_a_resumed_run_goes_on_bitwise(found, folder: Path, resumed: str) -> None:
    def since(run: str) -> list[dict[str, float]]:
        return [r for r in numbers(folder / f"{resumed} {run}") if r["step"] > SAVED]

    whole = since("whole")
    assert len(whole) == NUM_STEPS - SAVED + 1  # and the closing evaluation
    assert since("resumed") == whole
    assert [r["loss"] for r in whole if "loss" in r] == [
        step["loss"] for step in found["steps"][resumed][SAVED:]
    ]
