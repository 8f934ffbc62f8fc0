"""The training loop over a stage of two models: what it saves, goes on from, and refuses.

Where updates fail: what it saves, where it ends, and that all ranks agree.
"""

import math
from copy import copy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from puzzle_align.config.job import JobConfig
from puzzle_align.config.resolve import Job, RoleModel
from puzzle_align.config.roles import optimizer_config
from puzzle_align.config.saved import checkpoint_paths, open_checkpoint
from puzzle_align.config.sections.models import ModelConfig, RoleConfig
from puzzle_align.config.sections.optimizer import OptimizerConfig
from puzzle_align.config.sections.output import CheckpointConfig, TelemetryConfig
from puzzle_align.config.sections.rl import GenerationConfig
from puzzle_align.layout.hf_config import to_hf_config
from puzzle_align.layout.plan import ParallelPlan
from puzzle_align.runtime.checkpoint import folder as checkpoint_folder
from puzzle_align.runtime.checkpoint.models import Trained, save_checkpoint
from puzzle_align.runtime.groups.world import World
from puzzle_align.runtime.liveness.failure import CannotGoOn
from puzzle_align.stages import run
from puzzle_align.stages.divergence import Update, spoilt_weights
from puzzle_align.stages.trainer import Trainer
from puzzle_align.telemetry import StepStats
from tests.dist.several_models import RATES, SPECS, Place, build, digest, optimizer_step
from tests.dist.spawn import asked, run_ranks
from tests.jobs import placed, run_to_end
from tests.refusals import refusal
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
        """Pretend that the config had models of other dimensions."""
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
    run.work_lines = lambda *_args: iter(())  # the smallest stage has no outlook on its work
    run_to_end(trainer)


def _other_jobs(job: JobConfig) -> dict[str, JobConfig]:
    critic = replace(job.optimizer, adam_beta1=0.5, lr=1.0)
    return {
        "critic": replace(job, critic=replace(job.critic, optimizer=critic)),
        "generation": replace(job, generation=GenerationConfig(temperature=0.5)),
        "ppo": replace(job, ppo=replace(job.ppo, lam=0.5)),
        "reward": replace(job, reward=replace(job.reward, function="a:b")),
        "stage": replace(job, stage="dpo"),
    }


def _save_weights(folder: Path, role: str, world: World) -> dict[str, str]:
    """A checkpoint of the weights of one model alone, named ``role``; the model's digest here."""
    source = build({"actor": PLACES["actor"]}, world, seed=9)
    weights = {role: Trained(source["actor"].context, None)} if source else {}
    save_checkpoint(folder / role / "checkpoints", 0, {}, weights)
    return {name: digest(model) for name, model in source.items()}


def _run(rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    world = World(rank, world_size, torch.device("cpu"))
    job, whole = _job(folder), _Trainer(world)
    run_on(job, whole)
    given = _save_weights(folder, "actor", world)
    _save_weights(folder, "reward", world)
    resumed, started = _Trainer(world), _Trainer(world)
    others = {**_other_jobs(job), "weights": _job(folder, "reward")}
    refused = {name: refusal(partial(run_on, other, resumed)) for name, other in others.items()}
    refused["model"] = refusal(lambda: run_on(job, resumed.made_wide()))
    checkpoint_folder._LOCK_WAIT_S = 0.1
    with checkpoint_folder.locked(folder / "run", folder / "another"):  # as another run would
        elsewhere = replace(job.checkpoint, dir=str(folder / "elsewhere"))
        other = replace(job, checkpoint=elsewhere)
        refused["in_use"] = refusal(lambda: run_on(other, resumed))
    if rank == 0:
        (folder / f"run/checkpoints/step_{STEPS:08d}").rename(folder / "last")
    # What only says how fast is free to change.
    run_on(replace(job, generation=GenerationConfig(decode_batch_size=1)), resumed)
    run_on(_job(folder, "actor"), started)
    saved = map(open_checkpoint, checkpoint_paths(folder / "run/checkpoints"))
    return {
        "jobs": [(checkpoint.step, checkpoint.job["job_id"]) for checkpoint in saved],
        "whole": (whole.digests(), whole.kl_coef),
        "resumed": (resumed.digests(), resumed.kl_coef),
        "refused": refused,
        "fresh": whole.started_from,
        "given": given,
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
        steps, ids = zip(*rank["jobs"], strict=True)
        assert steps == (SAVED, STEPS) and len({*ids}) == 1  # the last one is saved anew


@pytest.mark.parametrize(
    ("what", "line"),
    [
        ("critic", "critic.optimizer.adam_beta1 is 0.5, but 0.9 in "),
        ("generation", "generation.temperature is 0.5, but 1.0 in "),
        ("ppo", "ppo.lam is 0.5, but 0.95 in "),
        ("reward", "reward.function is a:b, but null in "),
        ("stage", "stage is dpo, but ppo in "),
        (
            "model",
            "of another model than actor.model: intermediate_size is 64, but 32 there: restore it",
        ),
        ("in_use", "/run is in use by another run (process "),
        ("weights", "has weights of the reward, and stage ppo trains the actor and critic: name"),
    ],
)
def test_what_does_not_go_together_is_one_line(ranks: list[dict], what: str, line: str) -> None:
    for rank in ranks:
        assert line in rank["refused"][what]


def test_weights_of_one_model_are_a_start(ranks: list[dict]) -> None:
    for rank in ranks:
        assert rank["started"] == {"critic": rank["fresh"]["critic"], **rank["given"]}
        assert rank["kl_coef"] == 0.5 * 2**STEPS
    assert not ranks[0]["given"]
    assert ranks[1]["started"]["actor"] != ranks[1]["fresh"]["actor"]


LIMIT = 2
# What becomes of a run's updates: + made, - skipped, n made without a finite loss, w made with
# weights that are not finite, e made before an evaluation without a finite loss.
RUNS = {
    "one is skipped": "++-+++",
    "saved as soon as it learns again": "+--+++",
    "too many": "++---+",
    "no loss": "+nnn++",
    "the last one": "+++++-",
    "the last two": "++++--",
    "the last one has no loss": "+++++n",
    "all": "------",
    "weights": "++w+++",
    "held out": "+++++e",
    # With every step saved, and one kept.
    "each saved": "++++++",
    "one kept, the last two": "++++--",
    "one kept, too many": "+++---",
    "one kept, the last one": "+++++-",
}
# Others have each part of them: what is skipped or lost, how many times, and where in the run.
SLOW = (
    *("one is skipped", "no loss", "the last one", "the last two", "all"),
    *("each saved", "one kept, too many"),
)


class _Diverging(_Trainer):
    """Its models learn as told; only rank 1 knows of the actor's updates."""

    num_steps = 6

    def __init__(self, world: World, fates: str) -> None:
        super().__init__(world)
        self._world, self._fates, self._step = world, fates, 0

    def train_step(self, step: int) -> tuple[dict[str, float], StepStats]:
        done = super().train_step(step)
        fate, self._step = self._fates[step], step
        loss = math.nan if fate == "n" else 0.5
        self.updates = [Update("actor", fate != "-", loss, 1.0)] * (self._world.rank == 1)
        if fate == "w" and self._world.rank == 1:
            next(self.models["actor"].context.chunks[0].parameters()).data.view(-1)[-1] = math.inf
        return done

    def evaluate(self) -> dict[str, float]:
        return {"loss": math.inf if self._fates[self._step] == "e" else 0.5}


def _diverge(rank: int, world_size: int, folder: Path, names: list[str]) -> dict[str, str]:
    world = World(rank, world_size, torch.device("cpu"))
    said = {}
    for name in names:
        job = _job(folder, name)
        optimizer = replace(job.optimizer, max_skipped_steps=LIMIT)
        saves = CheckpointConfig(save_every=3, keep_last=0)
        if "kept" in name or "each" in name:
            saves = CheckpointConfig(save_every=1, keep_last=1)
        config = replace(job, optimizer=optimizer, checkpoint=saves)
        try:
            run_on(config, _Diverging(world, RUNS[name]))
            said[name] = ""
        except CannotGoOn as error:
            said[name] = str(error)
    return said


@pytest.fixture(scope="module")
def diverging(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("diverging")


@pytest.fixture(scope="module")
def said(request: pytest.FixtureRequest, diverging: Path) -> list[dict[str, str]]:
    return run_ranks(_diverge, 2, diverging, sorted(asked(request, "name")))


def _marked(*cases: tuple) -> list[Any]:
    return [pytest.param(*c, marks=pytest.mark.slow) if c[0] in SLOW else c for c in cases]


@pytest.mark.parametrize(
    ("name", "saved", "line"),
    _marked(
        ("one is skipped", [4, 6], None),
        ("saved as soon as it learns again", [4, 6], None),
        ("too many", [], "its last 3 updates, from step 3 on, failed (loss 0.5, gradient norm 1"),
        ("no loss", [], "its last 3 updates, from step 2 on, failed (loss nan, gradient norm 1"),
        ("the last one", [3, 6], None),
        ("the last two", [3], "its last 2 updates, from step 5 on, failed"),
        ("the last one has no loss", [3], "its last update, of step 6, failed (loss nan,"),
        ("all", [], "its last 3 updates, from step 1 on, failed"),
        ("weights", [], "step 3 left weights of the actor not finite: lower optimizer.lr"),
        ("held out", [3], "the loss of the held-out data is inf at step 6"),
    ),
)
def test_a_step_that_fails_is_not_saved(diverging, said, name, saved, line) -> None:
    found = [path.name for path in sorted((diverging / name / "checkpoints").glob("step_*"))]
    assert found == [f"step_{step:08d}" for step in saved]
    first, second = (rank[name] for rank in said)
    if line is None:
        assert first == second == ""
        return
    last = (
        f"the last checkpoint is {diverging}/{name}/checkpoints/step_{saved[-1]:08d}"
        if saved
        else ""
    )
    assert first == second  # whichever of them speaks
    assert first.endswith(last)
    assert line in first and len(first) < 600


@pytest.mark.parametrize(
    ("name", "kept", "line"),
    _marked(
        ("each saved", [5, 6], ""),
        ("one kept, the last two", [3, 4], "move it away to resume from step_00000003"),
        ("one kept, too many", [2, 3], "move it away to resume from step_00000002"),
        ("one kept, the last one", [4, 5, 6], ""),
    ),
)
def test_the_last_two_are_kept_and_none_is_deleted_at_a_step_that_fails(
    diverging: Path, said: list[dict[str, str]], name: str, kept: list[int], line: str
) -> None:
    """The last checkpoint may have weights that the last update threw far off."""
    found = [path.name for path in sorted((diverging / name / "checkpoints").glob("step_*"))]
    assert found == [f"step_{step:08d}" for step in kept]
    assert all(line in rank[name] and bool(line) == bool(rank[name]) for rank in said)


SPOILT = (math.inf, -math.inf, math.nan, torch.finfo(torch.float32).min)


def _spoilt(rank: int, world_size: int) -> list[list[str]]:
    """Roles found with one weight of the actor, on its only rank, at each of ``SPOILT``."""
    world, found = World(rank, world_size, torch.device("cpu")), []
    models = build(PLACES, world, seed=5)
    for value in SPOILT:
        if "actor" in models:
            *_, last = models["actor"].context.chunks[0].parameters()
            last.data.view(-1)[1] = value
        found.append(spoilt_weights(models, tuple(PLACES), world))
    return found


def test_one_weight_that_is_not_finite_is_found_on_all_ranks() -> None:
    assert run_ranks(_spoilt, 2) == [[["actor"]] * 3 + [[]]] * 2
