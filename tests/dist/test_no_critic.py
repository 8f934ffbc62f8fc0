"""A job without a critic against the same job with one: its memory, predicted and measured, groups.

The memory measured is that of all tensors that are alive on a rank after an iteration, whoever
holds them. The critic's share is counted by hand from its parameters.
"""

import gc
import json
from pathlib import Path

import pytest
import torch
from torch.distributed import distributed_c10d as c10d

from puzzle_align.commands.validate import validate_job
from puzzle_align.config.job import JobConfig
from puzzle_align.config.load import load_job
from puzzle_align.data.tokenize import ByteTokenizer
from puzzle_align.layout.groups import groups_of
from puzzle_align.layout.model import ModelOptions
from puzzle_align.runtime.groups.world import World
from puzzle_align.stages.banner import job_memory
from puzzle_align.stages.grpo import open_trainer
from puzzle_align.stages.outlook import open_outlook
from tests.dist.spawn import asked, marked, run_ranks
from tests.dist.test_group_runs import JOB, SIZES
from tests.jobs import job_plan, parallel, problems_of, resolved

LARGE = ["global_batch_size=8", "data.max_length=64"]  # sampling is the largest phase
SMALL = ["global_batch_size=2", "ppo.ppo_epochs=1"]
CRITIC = "ppo.advantage_estimator=gae"
PLANS = {
    "P2": parallel("actor", P=2),
    "T2": parallel("actor", T=2),
    "D2, sharded": [*parallel("actor", D=2), "optimizer.use_distributed_optimizer=true"],
}
# Its runs are the longest, and prove no kind of state that the others have not.
NAMES = marked(PLANS, slow=["T2"])
Measured = tuple[int, list[str]]


def job_of(folder: Path, overrides: list[str]) -> JobConfig:
    model = json.dumps({"model_type": "llama", **SIZES})
    return load_job(JOB, [f"output_dir={folder}", f"actor.model.config={model}", *overrides])


def critic_parameters(name: str, rank: int) -> int:
    """Parameters of a critic on a rank: H = 32, F = 64, 4 heads, 2 keys', of 8; 2 layers."""
    queries, keys, norms, embedding, top = 32 * 32, 32 * 16, 2 * 32, 384 * 32, 32 + 32
    matrices = 2 * queries + 2 * keys + 3 * 32 * 64  # of a layer
    if name == "T2":
        return 2 * (matrices // 2 + norms) + embedding // 2 + top
    if name == "P2":
        return matrices + norms + (top if rank else embedding)
    return 2 * (matrices + norms) + embedding + top


def critic_bytes(name: str, rank: int) -> dict[str, int]:
    """Its states in float32, Adam's two moments sharded over the replicas."""
    size = 4 * critic_parameters(name, rank)
    moments = size if "sharded" in name else 2 * size
    return {"critic weights": size, "critic gradients": size, "critic optimizer": moments}


def _alive() -> int:
    """Bytes of the storages of all tensors of this process."""
    gc.collect()
    tensors = [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _measured(world: World, job: JobConfig) -> Measured:
    """Bytes of all tensors after an iteration, and the groups that it made."""
    before = {*c10d._world.pg_names.values()}
    assert not problems_of(job, world.size)
    trainer = open_trainer(resolved(job, world.size), world)
    trainer.train_step(0)
    return _alive(), [name for name in c10d._world.pg_names.values() if name not in before]


def _runs(
    rank: int, world_size: int, folder: Path, names: set[str]
) -> dict[str, tuple[Measured, Measured]]:
    """Of each plan without and with a critic, one after the other in one process."""

    def run(overrides: list[str]) -> Measured:
        world = World(rank, world_size, torch.device("cpu"))
        return _measured(world, job_of(folder, [*SMALL, *overrides]))

    run(PLANS["P2"])  # leaves what stays in the process for good
    plans = {name: own for name, own in PLANS.items() if name in names}
    return {name: (run(own), run([*own, CRITIC])) for name, own in plans.items()}


Runs = list[dict[str, tuple[Measured, Measured]]]  # by rank


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return run_ranks(_runs, 2, tmp_path_factory.mktemp("critic"), asked(request, "name"))


def _predicted(job: JobConfig) -> list[dict[str, int]]:
    """What ``--validate`` predicts for both ranks, in bytes."""
    problems: list[str] = []
    found = resolved(job, 2)
    preview = open_outlook(job).preview(found.plan, ByteTokenizer(), problems)
    columns = job_memory(found, preview)
    assert not problems and [*columns] in (["0", "1"], ["0-1"])
    return [*columns.values()] * (3 - len(columns))


@pytest.mark.parametrize("name", NAMES)
def test_memory_is_predicted_lower_by_the_critic_s_states(tmp_path: Path, name: str) -> None:
    jobs = [job_of(tmp_path, [*LARGE, *PLANS[name], *critic]) for critic in ([], [CRITIC])]
    for rank, (less, more) in enumerate(zip(*map(_predicted, jobs), strict=True)):
        states = critic_bytes(name, rank)
        assert {part: more[part] for part in states} == states
        assert [part for part in more if part not in less] == [*states]
        assert less["generate"] == more["generate"] > max(more["learn"], more["score"])
        assert less["learn"] <= more["learn"] and less["score"] <= more["score"]
        assert more["total"] - less["total"] == sum(states.values())


@pytest.mark.parametrize("name", NAMES)
def test_memory_is_measured_lower_by_the_critic_s_states(runs: Runs, name: str) -> None:
    for rank, of_plans in enumerate(runs):
        (alone, _), (beside, _) = of_plans[name]
        states = sum(critic_bytes(name, rank).values())
        # Within a percent: Adam's counters of steps, and the sharded optimizer's buffers, where
        # every tensor begins at a multiple of 64 numbers.
        assert beside - alone == pytest.approx(states, rel=0.01)


@pytest.mark.parametrize("name", NAMES)
def test_no_process_group_is_made_for_a_critic(runs: Runs, name: str) -> None:
    """A pipeline's links are each model's own; other groups of the same ranks are shared."""
    for rank, of_plans in enumerate(runs):
        (_, alone), (_, beside) = of_plans[name]
        actor_and_reference = ["backward 0 of 0,1", "forward 0 of 0,1", "forward 1 of 0,1"]
        critic = ["backward 1 of 0,1", "forward 2 of 0,1"]
        if name != "P2":
            actor_and_reference, critic = [], []
        assert _names(alone) == sorted([*actor_and_reference, f"ranks {rank}"])
        assert _names(beside) == sorted([*_names(alone), *critic])


def _names(made: list[str]) -> list[str]:
    """Names of groups in the layout, without torch's number."""
    return sorted(name.partition(" #")[0] for name in made)


def test_groups_of_a_critic_s_own_plan_are_not_there_without_it(tmp_path: Path) -> None:
    """Four ranks, each a replica of the actor; the critic's are two pipelines."""
    actor = parallel("actor", D=4)
    both = [*actor, *parallel("critic", P=2, D=2), CRITIC]
    plans = [job_plan(job_of(tmp_path, own), ModelOptions(), 4) for own in (actor, both)]
    alone, beside = ({group.name for group in groups_of(plan, 0)} for plan in plans)
    pipeline = {"ranks 0,2", "forward 0 of 0,2", "backward 0 of 0,2"}
    assert alone == {"ranks 0", "ranks 0,1,2,3"}
    assert beside == {*alone, *pipeline, "ranks 0,1"}


def test_validate_tells_of_no_critic(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = []
    for overrides in (PLANS["P2"], [*PLANS["P2"], CRITIC]):
        validate_job(job_of(tmp_path, overrides), 2)
        said.append(capsys.readouterr().out)
    alone, beside = said
    assert "critic" not in alone
    lines = [line.split() for line in beside.splitlines()]
    for part in ("weights", "gradients", "optimizer"):
        assert any(line[:2] == ["critic", part] for line in lines)
    # The group of all ranks, and a link each way for each model that is trained, one for the other.
    assert "communicators: 4 on a rank at most" in alone
    assert "communicators: 6 on a rank at most" in beside
