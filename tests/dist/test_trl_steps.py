"""Whole runs of stage ``grpo`` against TRL's GRPOTrainer: the same checkpoint and responses.

``tests/golden/make_grpo_trl_steps.py`` runs TRL in float64. Ours runs in float32; of each optimizer
step the loss, the gradients, what TRL logs, and at the end the weights are held to 1e-5. Losses and
sums that cancel are held to 1e-5 of the terms: a token's loss is about 1, and a tensor's
product with a wave is of terms as large as its norm.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from puzzle_align.config.load import load_job
from puzzle_align.models.hf.weights import export_hf
from puzzle_align.runtime.context import Context
from puzzle_align.runtime.generation.sampling import Request, Response
from puzzle_align.runtime.groups.world import World
from puzzle_align.runtime.optimizer.optimizer import Optimizer
from puzzle_align.stages import ppo
from puzzle_align.stages.grpo import open_trainer
from puzzle_align.stages.rl import learning
from tests.dist.given_steps import BATCH, GENERATIONS, LONGEST, PROMPTS, SIZES, save_model, sums_of
from tests.dist.spawn import asked, marked, run_ranks
from tests.jobs import parallel, problems_of, resolved

TRL = json.loads((Path(__file__).parents[1] / "golden" / "grpo_trl_steps.json").read_text())
JOB = f"""
stage: grpo
global_batch_size: {BATCH}
max_steps: {TRL["iterations"]}
engine: {{device: cpu}}
reward: {{function: "tests.dist.given_steps:eighths"}}
tokenizer: {{path: byte}}
data: {{shuffle: false, max_length: 48}}
packing: {{row_tokens: 96}}
generation: {{num_generations: {GENERATIONS}, max_new_tokens: {LONGEST}}}
ppo: {{ppo_epochs: {TRL["epochs"]}, recompute_log_probs: true}}
optimizer: {{lr: 0.001, adam_beta1: 0.9, adam_beta2: 0.95, adam_eps: 1.0e-4}}
telemetry: {{progress: false, tensorboard: false}}
"""
PLANS = {"D2": parallel("actor", D=2), "P2": parallel("actor", P=2)}
SLOW = ("grpo", "gspo, corrected KL")  # two ranks have the one, others each part of the other
NAMES = marked(TRL["cases"], SLOW)
BOUND = 1e-5
MOVE_BOUND = 2e-4  # a step moves weights by 1e-3, and float32 rounds those near 1 by 6e-8
Sums = Mapping[str, Sequence[float]]  # ``sums_of`` of tensors, by Hugging Face's names


@dataclass
class Step:
    """An optimizer step on a rank."""

    loss: float = 0.0  # the share of this rank's rows
    norm: float = 0.0
    rate: float = 0.0
    gradients: Sums = field(default_factory=dict)


@dataclass
class Run:
    """A job on a rank."""

    steps: list[Step]
    metrics: list[dict[str, float]]  # by iteration
    weights: Sums
    moves: Sums  # of the weights, from first to last


def given(_context: Context, requests: Sequence[Request], *_: Any, **__: Any) -> list[Response]:
    """The given responses in place of sampled ones."""
    found = []
    for request in requests:
        assert list(request.prompt) == [
            SIZES["bos_token_id"],
            *PROMPTS[request.id // GENERATIONS].encode(),
        ]
        tokens = np.array(TRL["responses"][request.id])
        stopped = tokens[-1] == SIZES["eos_token_id"]
        found.append(Response(request.id, tokens, np.zeros(len(tokens), np.float32), bool(stopped)))
    return found


@contextmanager
def recorded(folder: Path | None) -> Iterator[list[Step]]:
    """Record the actor's losses and optimizer steps; gradients too, if there is a folder."""
    steps: list[Step] = []
    plain_step = Optimizer.step

    class Recorded(learning.ActorLoss):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            steps.append(Step())

        def __call__(self, *args: Any) -> torch.Tensor:
            loss = super().__call__(*args)
            steps[-1].loss += loss.item()
            return loss

    def step(self: Optimizer, lr: float, *args: Any) -> tuple[bool, float]:
        steps[-1].rate = lr
        if folder is not None:
            with gradients_as_weights(self.context):
                steps[-1].gradients = sums_by_name(exported(self.context, folder))
        moved, steps[-1].norm = plain_step(self, lr, *args)
        return moved, steps[-1].norm

    with (
        mock.patch.object(learning, "ActorLoss", Recorded),
        mock.patch.object(Optimizer, "step", step),
    ):
        yield steps


@contextmanager
def gradients_as_weights(context: Context) -> Iterator[None]:
    """Put the gradients in the weights' place, so that an export writes them."""
    weights = {p: p.data for chunk in context.chunks for p in chunk.parameters()}
    for parameter in weights:
        parameter.data = parameter.main_grad  # type: ignore[attr-defined]
    yield
    for parameter, data in weights.items():
        parameter.data = data


def exported(context: Context, folder: Path) -> dict[str, np.ndarray]:
    export_hf(context.chunks, context.spec, folder, "fp32")
    return load_file(folder / "model.safetensors")


def sums_by_name(tensors: Mapping[str, np.ndarray]) -> Sums:
    return {name: sums_of(tensor) for name, tensor in tensors.items()}


def _runs(
    rank: int, world_size: int, folder: Path, jobs: Mapping[str, Sequence[str]]
) -> dict[str, Run]:
    """This rank's records of every job, given by its overrides."""
    world, runs = World(rank, world_size, torch.device("cpu")), {}
    paths = [f"{role}.model.path={folder}/model" for role in ("actor", "reference")]
    files = [f"data.train={folder}/prompts.jsonl", f"output_dir={folder}/out"]
    for name, overrides in jobs.items():
        job = load_job(JOB, [*paths, *files, *overrides])
        assert not problems_of(job, world.size)
        is_whole = name != "P2" and rank == 0  # as an export needs it
        own = folder / f"{name} {world_size}" if is_whole else None
        with mock.patch.object(ppo, "generate", given), recorded(own) as steps:
            trainer = open_trainer(resolved(job, world.size), world)
            metrics = [trainer.train_step(number)[0] for number in range(job.max_steps)]
        weights, moves = {}, {}
        if own:
            weights = exported(trainer.models["actor"].context, own)
            first = load_file(folder / "model" / "model.safetensors")
            moves = {key: weight.astype(np.float64) - first[key] for key, weight in weights.items()}
        runs[name] = Run(steps, metrics, sums_by_name(weights), sums_by_name(moves))
    return runs


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("steps")
    save_model(path / "model")
    lines = [json.dumps({"prompt": text}) for text in PROMPTS]
    (path / "prompts.jsonl").write_text("\n".join(lines))
    return path


@pytest.fixture(scope="module")
def alone(request: pytest.FixtureRequest, folder: Path) -> dict[str, Run]:
    jobs = {name: TRL["cases"][name]["ours"] for name in sorted(asked(request, "name"))}
    return run_ranks(_runs, 1, folder, jobs)[0]


def near(value: float, cancels: bool = False) -> Any:
    return pytest.approx(value, rel=BOUND, abs=1e-6 if cancels else 1e-7)


def assert_sums_close(found: Sums, wanted: Sums, bound: float = BOUND) -> None:
    assert {*found} == {*wanted}
    for name, (norm, *products) in wanted.items():
        assert found[name][0] == pytest.approx(norm, rel=bound), name
        assert found[name][1:] == pytest.approx(products, abs=bound * norm), name


def assert_steps_close(name: str, runs: Sequence[Run]) -> None:
    """Hold the steps of a case, on all ranks together, to TRL's."""
    case = TRL["cases"][name]
    by_step = zip(*(run.steps for run in runs), strict=True)
    for own, wanted in zip(by_step, case["steps"], strict=True):
        logged = wanted["logged"]
        assert sum(step.loss for step in own) == near(wanted["loss"], cancels=True)
        assert own[0].norm == near(logged["grad_norm"])
        assert own[0].rate == near(logged["learning_rate"])
        if own[0].gradients:
            assert_sums_close(own[0].gradients, wanted["gradients"])
    if runs[0].weights:
        assert_sums_close(runs[0].weights, case["weights"])
        assert_sums_close(runs[0].moves, case["moves"], bound=MOVE_BOUND)


def assert_metrics_close(name: str, found: Sequence[Mapping[str, float]]) -> None:
    """Hold a case's metrics of iterations, means over the updates, to TRL's.

    With rewards scaled by the batch TRL's ``frac_reward_zero_std`` is of the batch, ours of groups.
    With GSPO its clip ratios are shares of responses, ours of tokens.
    """
    case, each = TRL["cases"][name], TRL["epochs"]
    for number, metrics in enumerate(found):
        steps = case["steps"][number * each : (number + 1) * each]
        first = steps[0]["logged"]
        same = {key: key for key in first if key.startswith("completions/")}
        same |= {"objective/scores": "reward", "reward_std": "reward_std"}
        if case["options"].get("scale_rewards") != "batch":
            same["frac_reward_zero_std"] = "frac_reward_zero_std"
        for own, key in same.items():
            assert metrics[own] == near(first[key]), (number, own)
        means = {"policy/grad_norm": "grad_norm", "policy/entropy_avg": "entropy", "kl": "kl"}
        if "importance_sampling_level" not in case["options"]:
            means |= {key: key for key in ("clip_ratio/low_mean", "clip_ratio/high_mean")}
            means["policy/clipfrac_avg"] = "clip_ratio/region_mean"
        for own, key in means.items():
            mean = fmean(step["logged"][key] for step in steps)
            assert metrics[own] == near(mean), (number, own)
        if case["options"]["loss_type"] == "dapo":  # a mean over tokens, as ``kl`` is
            loss = metrics["loss/policy_avg"] + metrics["objective/kl_coef"] * metrics["kl"]
            assert loss == near(fmean(step["loss"] for step in steps), cancels=True)


@pytest.mark.parametrize("name", NAMES)
def test_steps_and_metrics_are_trl_s(alone: dict[str, Run], name: str) -> None:
    assert all(step.gradients for step in alone[name].steps)
    assert_steps_close(name, [alone[name]])
    assert_metrics_close(name, alone[name].metrics)


# A pipeline's gradients are not held to TRL's, as replicas' are: it trains as they do elsewhere.
@pytest.mark.parametrize("plan", ["D2", pytest.param("P2", marks=pytest.mark.slow)])
def test_steps_are_trl_s_on_two_ranks(folder: Path, plan: str) -> None:
    job = [*TRL["cases"]["grpo"]["ours"], *PLANS[plan]]
    runs = [of_rank[plan] for of_rank in run_ranks(_runs, 2, folder, {plan: job})]
    assert_steps_close("grpo", runs)
    assert_metrics_close("grpo", runs[1].metrics)
