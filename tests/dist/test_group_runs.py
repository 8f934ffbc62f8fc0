"""Groups of responses without a critic: plain float64 numbers, the same under every plan.

The parent saves two tiny models with transformers. Responses are drawn by the run; the plain
trainer learns from the same ones.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from puzzle_align.config.job import JobConfig
from puzzle_align.config.load import load_job
from puzzle_align.runtime.groups.world import World
from puzzle_align.runtime.liveness.failure import CannotGoOn
from puzzle_align.stages.grpo import open_trainer
from tests.dist.plain_groups import PlainGroups, Response
from tests.dist.plain_ppo import text_of
from tests.dist.spawn import asked, marked, run_ranks
from tests.dist.split_rewards import mean_code
from tests.jobs import parallel, problems_of, resolved

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 260,
    "max_position_embeddings": 64,
    "initializer_range": 0.25,
    "bos_token_id": 257,
    "eos_token_id": 258,
}
# Adam's epsilon is far above the gradients' rounding, as in ``test_ppo_runs``. A prompt's responses
# have different rewards: between equal ones an advantage is rounding, and its sign decides whether
# a ratio is clipped.
JOB = """
stage: grpo
global_batch_size: 4
max_steps: 2
engine: {device: cpu}
reward: {function: "tests.dist.split_rewards:mean_code"}
tokenizer: {path: byte}
data: {format: synthetic, num_synthetic: 16, max_length: 48}
packing: {row_tokens: 96}
generation: {num_generations: 3, max_new_tokens: 8, min_new_tokens: 2}
ppo: {ppo_epochs: 2, clip_ratio: 0.1}
optimizer: {lr: 0.003, lr_scheduler_type: constant, weight_decay: 0.0, adam_eps: 1.0e-5}
telemetry: {progress: false, tensorboard: false}
"""
CASES = {
    "grpo": [],
    "grpo, batch, gspo": [
        "ppo.scale_rewards=batch",
        "ppo.loss_mode=gspo",
        "ppo.loss_agg_mode=seq-mean-token-mean",
        "ppo.kl_coef=0.1",
    ],
    "dr_grpo": [
        "ppo.advantage_estimator=dr_grpo",
        "ppo.loss_agg_mode=seq-mean-token-sum-norm",
        "ppo.use_kl_loss=false",
        "ppo.kl_coef=0.02",
    ],
    "rloo, cispo": ["ppo.advantage_estimator=rloo", "ppo.loss_mode=cispo", "ppo.kl_estimator=k2"],
    "reinforce++": [
        "ppo.advantage_estimator=reinforce_plus_plus",
        "ppo.whiten_advantages=true",
        "ppo.gamma=0.9",
        "ppo.use_kl_loss=false",
        "ppo.kl_estimator=k1",
        "ppo.kl_coef=0.02",
    ],
    "remax": [
        "ppo.advantage_estimator=remax",
        "ppo.use_kl_loss=false",
        "ppo.kl_coef=0.02",
        "ppo.loss_agg_mode=seq-mean-token-mean",
    ],
    "opo, masked": [
        "ppo.advantage_estimator=opo",
        "ppo.mask_truncated_completions=true",
        "ppo.loss_agg_mode=seq-mean-token-sum",
        "ppo.entropy_coeff=0.01",
    ],
}
for mode in ("token_mask", "sequence_truncate"):
    CASES[f"drifted, {mode}"] = [
        "ppo.recompute_log_probs=true",
        f"ppo.importance_sampling_mode={mode}",
        "ppo.importance_sampling_cap=1.1",
    ]
PLANS = {
    "D2": parallel("actor", D=2),
    "P2 time_shared": [*parallel("actor", P=2), "ppo.recompute_log_probs=true"],
    "P2 sequential": [
        *parallel("actor", P=2),
        "ppo.recompute_log_probs=true",
        "placement.score=sequential",
    ],
    "T2": parallel("actor", T=2, sp=True),
    "P2, samples D2": [*parallel("actor", P=2), *parallel("generation", D=2)],
}
PLANS["remax"] = [*PLANS["D2"], *CASES["remax"]]  # whose greedy responses have owners, too
# Others have each part of them, ``test_trl_steps`` batch-scaled rewards and GSPO, tests/unit the
# numbers of Dr. GRPO, REINFORCE++, OPO and masks, ``test_ppo_runs`` the other order of scoring,
# tensor ranks and the copy.
SLOW = (
    "grpo, batch, gspo",
    "dr_grpo",
    "reinforce++",
    "opo, masked",
    "drifted, token_mask",
    "D2",
    "P2 sequential",
    "T2",
    "P2, samples D2",
)
Metrics = list[dict[str, float]]  # by iteration


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("groups")
    for number, role in enumerate(("actor", "reference")):
        torch.manual_seed(number)
        LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(path / role)
    return path


def job_of(folder: Path, *overrides: str) -> JobConfig:
    paths = [f"{role}.model.path={folder / role}" for role in ("actor", "reference")]
    stops = json.dumps([258, *range(0, 260, 7)])  # so that about half of the responses end
    own = [f"output_dir={folder}/out", f"generation.stop_token_ids={stops}"]
    return load_job(JOB, [*own, *paths, *overrides])


def _runs(
    rank: int, world_size: int, folder: Path, cases: dict[str, list[str]]
) -> dict[str, tuple[Metrics, list[list[Response]]]]:
    """Metrics of every case, and the responses that this rank sampled."""
    world, runs = World(rank, world_size, torch.device("cpu")), {}
    for name, overrides in cases.items():
        job = job_of(folder, *overrides)
        assert not problems_of(job, world.size)
        trainer = open_trainer(resolved(job, world.size), world)
        assert {*trainer.models} <= {"actor"} and "critic" not in trainer.plan.models
        if name in ("P2 time_shared", "P2 sequential"):
            assert trainer.plan.phase("score").order == name.removeprefix("P2 ")
        metrics: Metrics = []
        sampled: list[list[Response]] = []
        generate = trainer.generate

        def recorded(step: int, seconds: dict[str, float], generate: Any = generate) -> Any:
            rollout, greedy = generate(step, seconds)
            for number, response in rollout.sampled.items() if "drifted" in name else ():  # noqa: B023
                away = np.sin(np.arange(len(response.tokens)) + number)
                response.log_probs[:] -= (0.2 * away).astype(response.log_probs.dtype)
            sampled.append(_responses(rollout, trainer.data))  # noqa: B023 - called in this pass
            return rollout, greedy

        trainer.generate = recorded  # type: ignore[method-assign]
        for step in range(job.max_steps):
            metrics.append(trainer.train_step(step)[0])
        runs[name] = metrics, sampled
    return runs


def _responses(rollout: Any, prompts: Any) -> list[Response]:
    found = []
    for sample, response in rollout.sampled.items():
        tokens, stopped = response.tokens.tolist(), bool(rollout.stopped[sample])
        text = text_of(tokens, stopped)
        prompt = prompts.prompt(rollout.prompt_of(sample)).tolist()
        score = mean_code([text])[0]
        logps = torch.from_numpy(response.log_probs.astype(np.float64))
        group = sample // rollout.num_generations
        found.append(Response(prompt, tokens, stopped, score, group, logps))
    return found


@pytest.fixture(scope="module")
def alone(
    folder: Path, request: pytest.FixtureRequest
) -> dict[str, tuple[Metrics, list[list[Response]]]]:
    names = asked(request, "name") | {"grpo", "remax"}
    (runs,) = run_ranks(_runs, 1, folder, {n: case for n, case in CASES.items() if n in names})
    return runs


@pytest.fixture(scope="module")
def on_two_ranks(
    folder: Path, request: pytest.FixtureRequest
) -> dict[str, tuple[Metrics, list[list[Response]]]]:
    names = asked(request, "plan")
    plans = {name: plan for name, plan in PLANS.items() if name in names}
    return run_ranks(_runs, 2, folder, plans)[0]


def _filtered(rank: int, world_size: int, folder: Path, plans: dict[str, list[str]]) -> Any:
    """Metrics, and prompts and tokens that this rank owns after filtering, by plan."""
    world, runs = World(rank, world_size, torch.device("cpu")), {}
    for name, overrides in plans.items():
        trainer = open_trainer(resolved(job_of(folder, *FILTERED, *overrides), world.size), world)
        found, collect = [], trainer.collect

        def recorded(step: int, seconds: dict[str, float], collect: Any = collect) -> Any:
            rollout, *rest = collect(step, seconds)
            owned = {s: r.tokens.tolist() for s, r in rollout.sampled.items()}
            found.append((rollout.prompts.tolist(), owned))  # noqa: B023 - called in this pass
            return (rollout, *rest)

        trainer.collect = recorded  # type: ignore[method-assign]
        metrics = []
        for step in range(2):
            shown, stats = trainer.train_step(step)
            # All that were sampled count, kept or not: three responses to four prompts a batch.
            assert stats.num_responses == 12 * shown["filter_groups/num_gen_batches"]
            metrics.append(shown)
        state = trainer.state_dict()
        again = open_trainer(resolved(job_of(folder, *FILTERED, *overrides), world.size), world)
        again.load_state_dict(state)
        assert again.state_dict() == state and state["num_drawn"] > 2
        runs[name] = metrics, found
    return runs


# The reward says whether a text has an even length: many groups of three have equal ones.
FILTERED = [
    "reward.function=tests.dist.split_rewards:is_even",
    "ppo.filter_groups.enable=true",
    "ppo.num_mini_batches=2",
    "ppo.recompute_log_probs=true",
]


def test_filtered_groups_fill_the_batch_and_are_the_same_under_every_plan(folder: Path) -> None:
    (alone,) = run_ranks(_filtered, 1, folder, {"one": []})
    first, second = run_ranks(_filtered, 2, folder, {"D2": PLANS["D2"]})
    metrics, found = alone["one"]
    for step, (prompts, owned) in zip(metrics, found, strict=True):
        assert len(prompts) == 4 and step["filter_groups/num_gen_batches"] >= 1
        assert step["frac_reward_zero_std"] == 0.0 and step["reward_std"] > 0.4
        assert sorted(owned) == [*range(12)]
    assert max(step["filter_groups/num_gen_batches"] for step in metrics) > 1
    for name, (other, mine) in first.items():
        assert_close(other, metrics, rel=1e-4)
        for (prompts, owned), (theirs, here), (_, there) in zip(
            found, mine, second[name][1], strict=True
        ):
            assert theirs == prompts and {**here, **there} == owned


def _error(rank: int, world_size: int, folder: Path) -> list[str]:
    world, lines = World(rank, world_size, torch.device("cpu")), []
    never = "reward.function=tests.dist.split_rewards:always"
    few = [*FILTERED, "ppo.filter_groups.max_num_gen_batches=1", "global_batch_size=8"]
    for overrides in ([*FILTERED, never], few):
        trainer = open_trainer(resolved(job_of(folder, *overrides), world.size), world)
        with pytest.raises(CannotGoOn) as caught:
            trainer.train_step(0)
        lines.append(str(caught.value))
    smaller = job_of(folder, *few, "ppo.filter_groups.allow_smaller=true")
    trainer = open_trainer(resolved(smaller, world.size), world)
    rollout, *_ = trainer.collect(0, {})
    assert len(rollout.lengths) % 6 == 0 and 0 < len(rollout.lengths) < 24
    metrics, stats = trainer.train_step(0)
    assert metrics["frac_reward_zero_std"] == 0.0 and stats.num_responses == 24
    return lines


def _shaped(rank: int, world_size: int, folder: Path) -> tuple[Metrics, list[tuple[str, ...]]]:
    """An iteration whose rewards differ by the missing-EOS penalty alone; ReMax's scoring."""
    world, scored = World(rank, world_size, torch.device("cpu")), []
    equal = [*FILTERED, "reward.function=tests.dist.split_rewards:always"]
    job = job_of(folder, *equal, "ppo.missing_eos_penalty=0.5", "generation.temperature=0.7")
    metrics = [open_trainer(resolved(job, world.size), world).train_step(0)[0]]
    model = json.dumps({"model_type": "llama", **SIZES})
    judge = [f"reward.model.config={model}", "reward.model.random_weights=true"]
    for own in ([], judge):
        trainer = open_trainer(resolved(job_of(folder, *CASES["remax"], *own), world.size), world)
        infer = trainer.run.infer

        def recorded(phase: Any, batches: Any, step: int, *roles: str, infer: Any = infer) -> Any:
            scored.append(roles)
            return infer(phase, batches, step, *roles)

        trainer.run.infer = recorded  # type: ignore[method-assign]
        baselines = trainer.collect(0, {})[2].baselines
        assert baselines is not None and np.isfinite(baselines).all()
    return metrics, scored


def test_groups_are_compared_as_they_are_trained_on(folder: Path) -> None:
    ((metrics, scored),) = run_ranks(_shaped, 1, folder)
    assert metrics[0]["frac_reward_zero_std"] == 0.0 and metrics[0]["reward_std"] > 0.1
    # Recomputed under the temperature of sampling.
    assert metrics[0]["sampling/sampling_logp_difference/max"] < 1e-5
    assert scored == [(), (), ("reward",)]  # greedy responses need no reference


def test_too_few_unequal_groups_are_an_error_or_a_smaller_batch(folder: Path) -> None:
    (lines,) = run_ranks(_error, 1, folder)
    assert lines[0].startswith("ppo.filter_groups: in 10 batches only 0 of 4 prompts have")
    assert lines[1].startswith("ppo.filter_groups: in 1 batches only ")


def assert_close(found: Metrics, expected: Metrics, rel: float) -> None:
    for step, (own, wanted) in enumerate(zip(found, expected, strict=True)):
        for name, value in wanted.items():
            assert own[name] == pytest.approx(value, rel=rel, abs=5e-6), (step, name)


@pytest.mark.parametrize("name", marked(CASES, SLOW))
def test_one_rank_is_the_plain_trainer(folder: Path, alone: dict[str, Any], name: str) -> None:
    metrics, sampled = alone[name]
    plain = PlainGroups(folder, job_of(folder, *CASES[name]))
    assert any(not r.stopped for step in sampled for r in step)
    assert_close(metrics, [plain.iteration(responses) for responses in sampled], rel=1e-5)
    if "drifted" in name:
        assert metrics[0]["sampling/sampling_logp_difference/max"] == pytest.approx(0.2, abs=0.01)
        assert metrics[0]["sampling/importance_sampling_ratio/max"] <= 1.1
    assert not {"loss/value_avg", "val/grad_norm"} & {*metrics[0]}
    assert metrics[0]["policy/grad_norm"] > 0


@pytest.mark.parametrize("plan", marked(PLANS, SLOW))
def test_every_plan_learns_the_same(
    alone: dict[str, Any], on_two_ranks: dict[str, Any], plan: str
) -> None:
    metrics, _ = on_two_ranks[plan]
    whole, _ = alone.get(plan, alone["grpo"])
    assert {*whole[0]} <= {*metrics[0]}
    assert_close(metrics, whole, rel=1e-5)
