"""The training loop over a stage of two models: what it saves, goes on from, and refuses."""

from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from puzzle_align.config.job import JobConfig
from puzzle_align.config.resolve import Job, RoleModel
from puzzle_align.config.roles import optimizer_config
from puzzle_align.config.sections.models import ModelConfig, RoleConfig
from puzzle_align.config.sections.optimizer import OptimizerConfig
from puzzle_align.config.sections.output import CheckpointConfig, TelemetryConfig
from puzzle_align.config.sections.rl import GenerationConfig
from puzzle_align.layout.hf_config import to_hf_config
from puzzle_align.layout.plan import ParallelPlan
from puzzle_align.runtime.checkpoint import folder as checkpoint_folder
from puzzle_align.runtime.checkpoint.models import Trained, save_checkpoint
from puzzle_align.runtime.groups.world import World
from puzzle_align.stages.run import train
from puzzle_align.stages.trainer import Trainer
from puzzle_align.telemetry import StepStats
from tests.dist.several_models import RATES, SPECS, Place, build, digest, optimizer_step
from tests.dist.spawn import run_ranks
from tests.jobs import placed
from tests.specs import TINY
from tests.unit.job_plans import context, phase_of, plan_of

PLACES = {
    "actor": Place((1,)),
    "critic": Place((0, 1), ParallelPlan(data=2)),
}  # rank 0 has no actor
STEPS, SAVED = 3, 2


class _Trainer(Trainer):
    """The smallest stage of two models, with a value of its own that grows step by step."""

    job: Job
    num_steps, num_skipped, data_fingerprint = STEPS, 0, "none"

    def __init__(self, world: World) -> None:
        self.world = world
        self.models = build(PLACES, world, seed=5)
        contexts = [
            context(role, place.plan, model=SPECS[role], ranks=place.ranks)
            for role, place in PLACES.items()
        ]
        self.plan = plan_of(phase_of(*contexts, name="learn"), stage="ppo")
        self.kl_coef = 0.5
        self.started_from: dict[str, str] | None = None

    def state_dict(self) -> dict[str, Any]:
        return {"kl_coef": self.kl_coef}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.kl_coef = state_dict["kl_coef"]

    def train_step(self, step: int) -> tuple[dict[str, float], StepStats]:
        if self.started_from is None:
            self.started_from = self.digests()
        for role, model in self.models.items():
            optimizer_step(role, model)
        self.kl_coef *= 2
        return {"loss": float(step)}, StepStats()

    def made_wide(self) -> "_Trainer":
        """As if the config had models of other dimensions."""
        other = copy(self)
        (learn,) = self.plan.phases
        wide = tuple(
            replace(context, model=replace(context.model, intermediate_size=64))
            for context in learn.contexts
        )
        other.plan = replace(self.plan, phases=(replace(learn, contexts=wide),))
        return other

    def digests(self) -> dict[str, str]:
        return {role: digest(model) for role, model in self.models.items()}


def _job(folder: Path, name: str = "run") -> JobConfig:
    return JobConfig(
        stage="ppo",
        output_dir=str(folder / name),
        actor=RoleConfig(model=ModelConfig(config=to_hf_config(TINY))),
        optimizer=OptimizerConfig(lr=RATES["actor"]),
        checkpoint=CheckpointConfig(save_every=SAVED, keep_last=0),
        telemetry=TelemetryConfig(progress=False, tensorboard=False),
    )


def run_on(config: JobConfig, trainer: _Trainer) -> None:
    """Run the loop with a trainer that has its models already."""
    contexts = trainer.plan.phases[0].contexts
    models = {
        own.role: RoleModel(
            role=own.role,
            key=f"{own.role}.model",
            spec=own.model,
            optimizer=optimizer_config(config, own.role),
        )
        for own in contexts
    }
    trainer.job = placed(config, *contexts, models=models)
    train(trainer, {})


def _refused(config: JobConfig, trainer: _Trainer) -> str:
    try:
        run_on(config, trainer)
    except ValueError as error:
        return str(error)
    return ""


def _other_jobs(job: JobConfig) -> dict[str, JobConfig]:
    critic = replace(job.optimizer, adam_beta1=0.5, lr=1.0)
    return {
        "critic": replace(job, critic=replace(job.critic, optimizer=critic)),
        "generation": replace(job, generation=GenerationConfig(temperature=0.5)),
        "ppo": replace(job, ppo=replace(job.ppo, lam=0.5)),
        "reward": replace(job, reward=replace(job.reward, function="a:b")),
        "stage": replace(job, stage="dpo"),
    }


def _save_weights(folder: Path, role: str, world: World) -> None:
    """A checkpoint that has the weights of one model alone, under the name ``role``."""
    source = build({"actor": PLACES["actor"]}, world, seed=9)
    weights = {role: Trained(source["actor"].context, None)} if source else {}
    save_checkpoint(folder / role / "checkpoints", 0, {}, weights)


def _run(rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    world = World(rank, world_size, torch.device("cpu"))
    job, whole = _job(folder), _Trainer(world)
    run_on(job, whole)
    _save_weights(folder, "actor", world)
    _save_weights(folder, "reward", world)
    resumed, started = _Trainer(world), _Trainer(world)
    others = {**_other_jobs(job), "weights": _job(folder, "reward")}
    refused = {name: _refused(other, resumed) for name, other in others.items()}
    refused["model"] = _refused(job, resumed.made_wide())
    checkpoint_folder._LOCK_WAIT_S = 0.1
    with checkpoint_folder.locked_output(folder / "run"):  # as another run would
        elsewhere = replace(job.checkpoint, dir=str(folder / "elsewhere"))
        refused["in_use"] = _refused(replace(job, checkpoint=elsewhere), resumed)
    if rank == 0:
        (folder / f"run/checkpoints/step_{STEPS:08d}").rename(folder / "last")
    # What only says how fast is free to change.
    run_on(replace(job, generation=GenerationConfig(decode_batch_size=1)), resumed)
    run_on(_job(folder, "actor"), started)
    return {
        "whole": (whole.digests(), whole.kl_coef),
        "resumed": (resumed.digests(), resumed.kl_coef),
        "refused": refused,
        "fresh": whole.started_from,
        "started": started.started_from,
        "kl_coef": started.kl_coef,
    }


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    return run_ranks(_run, 2, tmp_path_factory.mktemp("loop"))


def test_a_resumed_run_ends_where_the_whole_one_does(ranks: list[dict]) -> None:
    for rank in ranks:
        assert rank["resumed"] == rank["whole"]
        assert rank["whole"][1] == 0.5 * 2**STEPS


@pytest.mark.parametrize(
    ("what", "line"),
    [
        ("critic", "critic.optimizer.adam_beta1 is 0.5, but 0.9 in "),
        ("generation", "generation.temperature is 0.5, but 1.0 in "),
        ("ppo", "ppo.lam is 0.5, but 0.95 in "),
        ("reward", "reward.function is a:b, but None in "),
        ("stage", "stage is dpo, but ppo in "),
        ("model", "of another model than actor.model: restore it"),
        ("in_use", "/run is in use by another run (process "),
        ("weights", "has weights of the reward, and stage ppo trains the actor and critic: name"),
    ],
)
def test_what_does_not_go_together_is_one_line(ranks: list[dict], what: str, line: str) -> None:
    for rank in ranks:
        assert line in rank["refused"][what]
        assert "\n" not in rank["refused"][what]


def test_weights_of_one_model_are_a_start(ranks: list[dict]) -> None:
    for rank in ranks:
        assert rank["started"]["critic"] == rank["fresh"]["critic"]
        assert rank["kl_coef"] == 0.5 * 2**STEPS
    assert "actor" not in ranks[0]["started"]
    assert ranks[1]["started"]["actor"] != ranks[1]["fresh"]["actor"]
