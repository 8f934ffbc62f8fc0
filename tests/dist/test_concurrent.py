"""The reference on ranks of its own: the same training as in sequence, and truly beside it.

Every case is a policy's and a reference's plan. It runs sequentially on the policy's ranks alone,
and concurrently on the ranks of both: whole, and stopped after some steps by a signal to a rank of
the reference, then resumed.
"""

import json
import os
import shutil
import signal
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from puzzle_align.config.job import JobConfig
from puzzle_align.config.load import load_job
from puzzle_align.config.sections.optimizer import OptimizerConfig
from puzzle_align.layout.plan import ParallelPlan
from puzzle_align.runtime.groups.collectives import barrier
from puzzle_align.runtime.groups.world import World
from puzzle_align.runtime.optimizer import optimizer as optimizer_module
from puzzle_align.runtime.optimizer.optimizer import Optimizer
from puzzle_align.stages.dpo import DPOTrainer, open_trainer
from tests.dist.random_models import random_context, trainable
from tests.dist.resumed_run import LLAMA, state_hash
from tests.dist.spawn import asked, marked, run_ranks
from tests.jobs import resolved, run_to_end
from tests.metrics import numbers
from tests.specs import TINY

STEPS, STOPPED = 4, 2
JOB = f"""
global_batch_size: 8
max_steps: {STEPS}
engine: {{device: cpu}}
actor:
  model: {{config: {json.dumps(LLAMA)}}}
reference:
  model: {{config: {json.dumps({**LLAMA, "initializer_range": 0.1})}}}
tokenizer: {{path: byte}}
data: {{format: synthetic, num_synthetic: 52, max_length: 64, eval_fraction: 0.2}}
packing: {{row_tokens: 64}}
optimizer: {{lr: 1.0e-2}}
checkpoint: {{keep_last: 0}}
telemetry: {{progress: false, tensorboard: false, eval_every: 2}}
"""
P2, D2, T2, ONE = (
    {"pipeline_model_parallel_size": 2},
    {"data_parallel_size": 2},
    {"tensor_model_parallel_size": 2},
    {"data_parallel_size": 1},
)
CASES = {  # policy's plan, reference's, ranks of both
    "P2 + one": (P2, ONE, 3),
    "P2 + D2": (P2, D2, 4),
    "D2 + P2": (D2, P2, 4),
    "T2 + T2": (T2, T2, 4),
}
# In sequence both plans cover the policy's two ranks: the reference of "P2 + one" is cut in two
# there, which changes none of its numbers.
SEQUENTIAL_REFERENCE = {"P2 + one": P2, "P2 + D2": D2, "D2 + P2": P2, "T2 + T2": T2}
SHARDED = ("D2 + P2",)  # over the policy's ranks alone
# Others have each part of them, "P2 + one" a stop and what is resumed; tensor ranks of a model do
# the same beside another as alone.
SLOW = ("P2 + D2", "T2 + T2")
SLOW_STOPPED = (*SLOW, "D2 + P2")


def _job(name: str, folder: Path, placement: str) -> JobConfig:
    policy, reference, _ = CASES[name]
    if placement == "sequential":
        reference = SEQUENTIAL_REFERENCE[name]
    plans = {"actor": policy, "reference": reference}
    return load_job(
        JOB,
        [
            f"output_dir={folder}",
            f"placement.reference={placement}",
            f"optimizer.use_distributed_optimizer={name in SHARDED}",
            *(f"{role}.parallel={json.dumps(plan)}" for role, plan in plans.items()),
        ],
    )


def _open(config: JobConfig, rank: int, world_size: int) -> DPOTrainer:
    world = World(rank, world_size, torch.device("cpu"))
    return open_trainer(resolved(config, world.size), world)


def _run(config: JobConfig, rank: int, world_size: int, stop: int | None = None) -> str | None:
    """Train, to the end or until the last rank is asked to stop; the hash of the policy's state."""
    trainer = _open(config, rank, world_size)
    if stop is not None and rank == world_size - 1:
        step_of = trainer.train_step

        def asked(step: int) -> Any:
            if step == stop - 1:
                os.kill(os.getpid(), signal.SIGTERM)
            return step_of(step)

        trainer.train_step = asked
    run_to_end(trainer)
    return None if trainer.policy is None else state_hash(trainer)


def _concurrent(
    rank: int, world_size: int, folder: Path, names: set[str], stopped: set[str]
) -> dict[str, Any]:
    hashes = {}
    for name in (name for name in CASES if name in names and CASES[name][2] == world_size):
        again = (("stopped", STOPPED), ("stopped", None)) if name in stopped else ()
        for kind, stop in (("whole", None), *again):
            config = _job(name, folder / name / kind, "concurrent")
            hashes[name, kind] = _run(config, rank, world_size, stop)
    return hashes


def _sequential(rank: int, world_size: int, folder: Path, names: set[str]) -> dict[str, Any]:
    """Cases in sequence; and the first on from a checkpoint of its concurrent run."""
    hashes = {}
    for name in sorted(names):
        config = _job(name, folder / name / "sequential", "sequential")
        hashes[name, "sequential"] = _run(config, rank, world_size)
    name, step = "P2 + one", f"checkpoints/step_{STOPPED:08d}"
    if rank == 0:
        shutil.copytree(folder / name / "stopped" / step, folder / name / "on" / step)
    barrier()
    hashes[name, "on"] = _run(_job(name, folder / name / "on", "sequential"), rank, world_size)
    return hashes


@pytest.fixture(scope="module")
def runs(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> tuple[Path, dict[tuple[str, str], list[str]]]:
    folder, stopped = tmp_path_factory.mktemp("concurrent"), asked(request, "stopped")
    stopped |= {"P2 + one"}
    names = asked(request, "name") | stopped
    ranks = [run_ranks(_concurrent, size, folder, names, stopped) for size in (3, 4)]
    ranks.append(run_ranks(_sequential, 2, folder, names))
    return folder, {
        key: [found[key] for found in spawned if found[key] is not None]
        for spawned in ranks
        for key in spawned[0]
    }


def _metrics(folder: Path) -> list[dict[str, float]]:
    return numbers(folder, "fill")


@pytest.mark.parametrize("name", marked(CASES, SLOW))
def test_losses_evaluations_and_weights_are_those_of_the_sequential_run(runs, name: str) -> None:
    folder, hashes = runs
    sequential = _metrics(folder / name / "sequential")
    assert sum("loss" in record for record in sequential) == STEPS
    assert sum("eval_loss" in record for record in sequential) == 3
    assert _metrics(folder / name / "whole") == sequential
    assert hashes[name, "whole"] == hashes[name, "sequential"]


@pytest.mark.parametrize("stopped", marked(CASES, SLOW_STOPPED))
def test_a_signal_to_a_rank_of_the_reference_stops_all_and_a_resumed_run_is_the_same(
    runs, stopped: str
) -> None:
    folder, hashes = runs[0] / stopped, runs[1]
    checkpoints = sorted(path.name for path in (folder / "stopped/checkpoints").glob("st*"))
    assert checkpoints == [f"step_{STOPPED:08d}", f"step_{STEPS:08d}"]
    assert _metrics(folder / "stopped") == _metrics(folder / "whole")
    assert hashes[stopped, "stopped"] == hashes[stopped, "whole"]


def test_a_checkpoint_knows_nothing_of_the_reference_s_ranks(runs) -> None:
    folder, hashes = runs
    name = "P2 + one"
    saved = folder / name / "stopped" / f"checkpoints/step_{STOPPED:08d}"
    assert json.loads((saved / "job.json").read_text())["models"]["actor"]["world_size"] == 2
    written = {path.name: path.stat().st_size for path in saved.glob("*.distcp")}
    assert written["__0_0.distcp"] and written["__1_0.distcp"] and not written["__2_0.distcp"]
    on = _metrics(folder / name / "on")
    whole = [record for record in _metrics(folder / name / "whole") if record["step"] > STOPPED]
    assert on == whole
    assert hashes[name, "on"] == hashes[name, "whole"]


WORK_S = 1.0


def _stamped(rank: int, world_size: int, folder: Path) -> dict[int, tuple[float, float]]:
    """When this rank's model worked, by step: the work is a sleep, for cores may be few."""
    plans = [f"{role}.parallel={json.dumps(ONE)}" for role in ("actor", "reference")]
    config = load_job(
        JOB,
        [
            f"output_dir={folder}",
            "placement.reference=concurrent",
            "max_steps=5",
            "data.eval_fraction=0",
            *plans,
        ],
    )
    trainer = _open(config, rank, world_size)
    stamps = {}

    def stamp(owner: Any, name: str) -> None:
        work = getattr(owner, name)

        def stamped(*arguments: Any) -> Any:
            started = time.monotonic()
            result = work(*arguments)
            time.sleep(WORK_S)
            step = next(argument for argument in arguments if isinstance(argument, int))
            stamps[step] = (started, time.monotonic())
            return result

        setattr(owner, name, stamped)

    stamp(trainer.run, "infer" if trainer.policy is None else "train")
    run_to_end(trainer)
    return stamps


def test_the_reference_runs_the_next_batch_while_the_policy_trains(tmp_path: Path) -> None:
    policy, reference = run_ranks(_stamped, 2, tmp_path)
    assert list(policy) == list(reference) == list(range(5))
    for step in range(4):
        starts, ends = zip(policy[step], reference[step + 1], strict=True)
        assert min(ends) > max(starts), step
        assert reference[step + 1][1] <= policy[step + 1][0]


def _alone(rank: int, world_size: int) -> list[tuple[int, Any]]:
    """Rank 0 makes an optimizer beside rank 1; then tells whom Megatron would have asked."""
    world = World(rank, world_size, torch.device("cpu"))
    if rank > 0:
        return []
    context = random_context(TINY, ParallelPlan(), world, seed=0)
    trainable(context, OptimizerConfig())
    asked = []

    def gather(found: list[Any], value: Any, group: Any = None) -> None:
        asked.append((len(found), group))
        found[:] = [value] * len(found)

    dist.all_gather_object = gather
    optimizer_module.world_is = lambda _group: nullcontext()
    Optimizer(context, OptimizerConfig())
    return asked


def test_an_optimizer_is_made_without_ranks_that_have_none() -> None:
    """Build with ``world_is``: without it, Megatron asks the whole world."""
    asked, _ = run_ranks(_alone, 2)
    assert asked and set(asked) == {(2, None)}
