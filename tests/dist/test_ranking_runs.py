"""Rankings against the same comparisons spelled out as pairs: losses, gradients, metrics.

Runs of a world size share one spawn. A batch is the whole data set, so that it holds the same
comparisons in both forms; the optimizer's steps between are the same to rounding.
"""

import json
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from puzzle_align.config.load import load_job
from puzzle_align.data import synthetic
from puzzle_align.runtime.columns import Table
from puzzle_align.runtime.groups.world import World
from puzzle_align.stages.dpo import DPOTrainer
from puzzle_align.stages.preference.trainer import PreferenceTrainer
from puzzle_align.stages.reward import RewardTrainer
from tests.bounds import LOSS_BOUND
from tests.dist.preference_step import Shard, assemble, gradient_shards
from tests.dist.spawn import asked, marked, run_ranks
from tests.jobs import parallel, resolved

NUM_STEPS = 2
MODEL = """
      {model_type: llama, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2,
       num_attention_heads: 4, num_key_value_heads: 2, vocab_size: 260,
       max_position_embeddings: 128, initializer_range: 0.2}
"""
JOB = f"""
max_steps: {NUM_STEPS}
engine: {{device: cpu}}
data: {{max_length: 64, shuffle: false}}
packing: {{row_tokens: 128}}
optimizer: {{lr: 0.003, warmup_steps: 0}}
telemetry: {{progress: false, tensorboard: false}}
"""
DPO = f"""
stage: dpo
dpo: {{beta: 0.5}}
actor: {{model: {{config: {MODEL}}}}}
reference: {{model: {{config: {MODEL.replace("range: 0.2", "range: 0.3")}}}}}
"""
REWARD = f"stage: reward\nreward: {{model: {{config: {MODEL}}}}}\n"
STAGES = {
    "dpo": (DPO, "actor", DPOTrainer),
    "own reference": (DPO.partition("reference:")[0], "actor", DPOTrainer),
    "reward": (REWARD, "reward", RewardTrainer),
}
P2, D2, T2 = {"P": 2}, {"D": 2}, {"T": 2}
# By name: the kind of rankings, the stage, keys for both forms.
LOSSES: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "four": ("four", "dpo", ()),
    "uneven": ("uneven", "dpo", ()),
    "best": ("uneven", "dpo", ("data.comparisons=best",)),
    "reward": ("uneven", "reward", ("reward_loss.center_rewards_coefficient=0.01",)),
    "AOT": ("uneven", "dpo", ("dpo.loss_type=[aot, aot_unpaired]",)),
    "WPO": ("four", "dpo", ("dpo.use_weighting=true", "dpo.sft_loss_weight=0.3")),
    "CPO": (
        "uneven",
        "dpo",
        ("dpo.loss_type=simpo", "dpo.sft_loss_weight=1", "dpo.nll_scope=batch"),
    ),
    "table": ("uneven", "dpo", ("dpo.precompute_ref_log_probs=true",)),
}
# Of whole rankings: there are no pairs to compare with.
WHOLE = {
    "PL": ("uneven", "dpo", ("dpo.loss_type=plackett_luce",)),
    "PL at first": ("uneven", "own reference", ("dpo.loss_type=plackett_luce",)),
    "PL reward": ("uneven", "reward", ("reward_loss.loss_type=plackett_luce",)),
}
# Under other plans and layouts: of both stages.
PLANS: dict[int, dict[str, tuple[dict[str, int], tuple[str, ...]]]] = {
    1: {
        "paired": ({}, ("packing.layout=paired",)),
        "padded": ({}, ("packing.layout=padded",)),
        "not packed": ({}, ("packing.enabled=false", "packing.row_tokens=256")),
    },
    2: {
        "data": (D2, ()),
        "pipeline": (P2, ()),
        "tensor": (T2, ("packing.layout=paired",)),
    },
}
PLAN_NAMES = [plan for plans in PLANS.values() for plan in plans]
Result = tuple[list[dict[str, float]], dict[str, np.ndarray]]


def _rankings(kind: str) -> list[dict[str, Any]]:
    """Nine rankings: of four responses without ties, or of two to four, some tied."""
    rows = []
    for n, (prompt, first, second) in enumerate(synthetic.generate(9, seed=3)):
        texts = [first * (1 + n % 5), second * (1 + n % 3), first + second, second * 2 + first]
        scores, number = [2.0, 0.5, 3.0, 1.0], 4
        if kind == "uneven":
            number, scores[n % 4] = 2 + n % 3, 3.0 if n % 2 else 0.5
        rows.append({"prompt": prompt, "responses": texts[:number], "scores": scores[:number]})
    return [row for row in rows if len({*row["scores"]}) > 1]


def _pairs(rankings: list[dict[str, Any]], best: bool) -> list[dict[str, str]]:
    """The comparisons of the rankings, written out here on their own."""
    rows = []
    for ranking in rankings:
        rated = sorted(
            zip(ranking["scores"], ranking["responses"], strict=True), key=lambda pair: -pair[0]
        )
        for place, (score, text) in enumerate(rated[:1] if best else rated):
            rows += [
                {"prompt": ranking["prompt"], "chosen": text, "rejected": other}
                for lower, other in rated[place + 1 :]
                if lower < score
            ]
    return rows


def _run(world: World, folder: Path, name: str, form: str, *overrides: str) -> tuple[Any, Any]:
    """Metrics held out and of the steps, and this rank's shards of the first step's gradients."""
    kind, stage, keys = (LOSSES | WHOLE)[name]
    rankings = _rankings(kind)
    rows = rankings if form == "ranked" else _pairs(rankings, "data.comparisons=best" in keys)
    source = folder / f"{name}.{form}.jsonl"
    if world.rank == 0:
        source.write_text("\n".join(map(json.dumps, rows)))
    text, _, trainer_of = STAGES[stage]
    own = [f"data.train={source}", f"data.cache_dir={folder}/cache", f"output_dir={folder}/out"]
    own += [f"data.eval={source}", f"global_batch_size={len(rows)}"]
    job = load_job(text + JOB, [*own, *keys, *overrides])
    trainer = trainer_of(resolved(job, world.size), world)
    evaluated = trainer.evaluate() or {}
    first, gradients = _first_step(trainer)
    others = [trainer.train_step(step)[0] for step in range(1, NUM_STEPS)]
    return [evaluated, first, *others, trainer.evaluate() or {}], gradients


def _first_step(trainer: PreferenceTrainer) -> tuple[dict[str, float], list[Shard]]:
    """The metrics of the trainer's step, and the gradients that it updates with."""
    table = Table(by_response=trainer.run.fed(trainer.phase, trainer.batches, 0))
    partners = trainer.partners(0, table) if trainer.objective.sorts_batch else None
    loss = trainer.loss_of(0, partners=partners)
    trainer.run.train(trainer.phase, trainer.batches, 0, {trainer.trained.role: loss}, table)
    shards = [] if trainer.policy is None else gradient_shards(trainer.policy)
    return trainer.update(0, loss), shards


def _all_runs(
    rank: int, world_size: int, folder: str, names: set[str], pairs: set[tuple[str, str]]
) -> dict[str, Any]:
    world, place = World(rank, world_size, torch.device("cpu")), Path(folder)
    results = {}
    if world_size == 1:
        for name in sorted(names & LOSSES.keys()):
            for form in ("ranked", "spelled out"):
                results[f"{name}, {form}"] = _run(world, place, name, form)
        for name in WHOLE:
            results[name] = _run(world, place, name, "ranked")
    for name, plan in sorted(pairs):
        if plan in PLANS[world_size]:
            sizes, keys = PLANS[world_size][plan]
            role = STAGES[(LOSSES | WHOLE)[name][1]][1]
            overrides = (*parallel(role, **sizes), *keys)
            results[f"{name}, {plan}"] = _run(world, place, name, "ranked", *overrides)
    return results


@pytest.fixture(scope="module")
def results(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> dict[str, Result]:
    found: dict[str, Result] = {}
    names, pairs = asked(request, "name"), asked(request, "name", "plan")
    for world_size in (1, 2):
        folder = str(tmp_path_factory.mktemp(f"ranks{world_size}"))
        by_rank = run_ranks(_all_runs, world_size, folder, names, pairs)
        for name in by_rank[0]:
            shards = [shard for rank in by_rank for shard in rank[name][1]]
            metrics = next(rank[name][0] for rank in by_rank if rank[name][0][0])
            found[name] = metrics, assemble(shards)
    return found


def _assert_same(found: Result, expected: Result, what: str) -> None:
    for step, (ours, theirs) in enumerate(zip(found[0], expected[0], strict=True)):
        assert ours.keys() == theirs.keys()
        for key in ours.keys() - {"num_tokens"}:  # rankings hold each response once
            bound = LOSS_BOUND if step < 2 or key == "loss" else 10 * LOSS_BOUND
            assert ours[key] == pytest.approx(theirs[key], rel=bound, abs=1e-6), (what, step, key)
    assert found[1].keys() == expected[1].keys()
    for key, values in expected[1].items():
        error = np.linalg.norm(found[1][key] - values) / np.linalg.norm(values)
        assert error < LOSS_BOUND, f"{what}: {key} is off by {error:.1e}"


# Uneven rankings have ranks with four responses; each plan and layout has some of the others.
SLOW = {"four", *(("four", plan) for plan in PLAN_NAMES)}
SLOW |= {("reward", plan) for plan in PLAN_NAMES if plan not in ("paired", "data")}
SLOW |= {("PL", plan) for plan in PLAN_NAMES if plan not in ("paired", "pipeline")}
SLOW |= {("PL reward", plan) for plan in PLAN_NAMES if plan not in ("padded", "data")}


@pytest.mark.parametrize("name", marked(LOSSES, SLOW))
def test_rankings_train_as_their_pairs_spelled_out(name: str, results: dict[str, Result]) -> None:
    _assert_same(results[f"{name}, ranked"], results[f"{name}, spelled out"], name)


@pytest.mark.parametrize(
    ("name", "plan"), marked(product(("four", "uneven", "reward"), PLAN_NAMES), SLOW)
)
def test_and_under_every_plan_and_layout(name: str, plan: str, results: dict[str, Result]) -> None:
    _assert_same(results[f"{name}, {plan}"], results[f"{name}, spelled out"], f"{name}, {plan}")


def test_at_first_all_orders_are_equally_probable(results: dict[str, Result]) -> None:
    """Policy and reference are one: each response is one of itself and all worse ones."""
    losses = [
        sum(np.log(1 + sum(other < score for other in row["scores"])) for score in row["scores"])
        for row in _rankings("uneven")
    ]
    for first in results["PL at first"][0][:2]:  # held out, and of the first step
        assert first["loss"] == pytest.approx(np.mean(losses), rel=1e-6)
        assert first["rewards/accuracies"] == 0.5


@pytest.mark.parametrize(("name", "plan"), marked(product(("PL", "PL reward"), PLAN_NAMES), SLOW))
def test_whole_rankings_train_alike_too(name: str, plan: str, results: dict[str, Result]) -> None:
    _assert_same(results[f"{name}, {plan}"], results[name], f"{name}, {plan}")
