"""Weights sent to the sampling copy beside a step, and gradients set aside while it samples.

Neither changes a number of ``test_ppo_runs``' job, and both happen when they are asked for.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from puzzle_align.runtime.groups.world import World
from puzzle_align.runtime.optimizer.optimizer import Optimizer
from puzzle_align.runtime.shadow import Shadow
from puzzle_align.stages import ppo
from tests.dist.spawn import run_ranks
from tests.dist.test_optimizer import gradient_bytes
from tests.dist.test_ppo_runs import FEWER_ITERATIONS, NUM_ITERATIONS, Metrics, job_of, save_inputs
from tests.jobs import parallel, problems_of, resolved

SWITCHES = {
    "P2 to T2": [*parallel("actor", P=2), *parallel("generation", T=2)],
    "D2 sharded to T2": [
        *parallel("actor", D=2),
        "optimizer.use_distributed_optimizer=true",
        *parallel("generation", T=2),
    ],
    "rank 0 to rank 1": [
        *(f"{role}.ranks=0-0" for role in ("actor", "critic", "reference", "reward")),
        "generation.ranks=1-1",
    ],
}
# What an iteration may be, and how many end with a step beside which to switch: none that the KL
# ends or that trains the critic alone, and not the job's third, which nothing follows.
STATES = {
    "bf16, the critic alone at first": (["engine.dtype=bf16", "ppo.critic_warmup=1"], 1),
    "ended by the KL": (["ppo.target_kl=1e-6"], 0),
    "a last step that is skipped": ([], FEWER_ITERATIONS),
}
# Of the slow ones, the first has no step beside which to switch, as when the critic is alone;
# ``test_main_weights`` sends weights from shards.
SWITCHED = (
    pytest.param("P2 to T2", "ended by the KL", marks=pytest.mark.slow),
    ("P2 to T2", "a last step that is skipped"),
    pytest.param("D2 sharded to T2", "bf16, the critic alone at first", marks=pytest.mark.slow),
    ("rank 0 to rank 1", "bf16, the critic alone at first"),
)


@dataclass
class Run:
    """A job on a rank."""

    metrics: Metrics
    num_beside: int  # switches beside a step
    held: list[int] = field(default_factory=list)  # bytes of gradients at each sampling


def _run(world: World, folder: Path, overrides: list[str], iterations: int) -> Run:
    job = job_of(folder, *overrides)
    assert not problems_of(job, world.size)
    trainer = ppo.open_trainer(resolved(job, world.size), world)
    held: list[int] = []
    generate = ppo.generate

    def noted(*arguments: Any, **named: Any) -> Any:
        held.append(sum(map(gradient_bytes, trainer.run.optimizers.values())))
        return generate(*arguments, **named)

    with (
        mock.patch.object(ppo, "generate", noted),
        mock.patch.object(Shadow, "step", autospec=True, side_effect=Shadow.step) as beside,
    ):
        metrics = [trainer.train_step(step)[0] for step in range(iterations)]
    return Run(metrics, beside.call_count, held)


def _beside_and_after(
    rank: int, world_size: int, folder: Path, where: str, state: str
) -> tuple[Run, Run]:
    """A run that switches beside the step and sets gradients aside, and one that does neither."""
    world = World(rank, world_size, torch.device("cpu"))
    reduce_gradients = Optimizer.reduce_gradients

    def run(asked: str) -> Run:
        if "skipped" in state:
            Optimizer.reduce_gradients = _spoiling(reduce_gradients, step=2)
        keys = [f"generation.{key}={asked}" for key in ("overlap_switch", "offload_optimizer")]
        iterations = NUM_ITERATIONS if "alone" in state else FEWER_ITERATIONS
        return _run(world, folder, [*SWITCHES[where], *STATES[state][0], *keys], iterations)

    return run("true"), run("false")


def _spoiling(
    reduce_gradients: Callable[[Optimizer], None], step: int
) -> Callable[[Optimizer], None]:
    """Wrap ``reduce_gradients``: the actor's are not finite at a step, counted from 1."""
    steps = itertools.count(1)

    def spoil(optimizer: Optimizer) -> None:
        reduce_gradients(optimizer)
        if optimizer.context.role == "actor" and next(steps) == step:
            for parameter in optimizer.context.chunks[0].parameters():
                parameter.main_grad.fill_(float("inf"))

    return spoil


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ppo")
    save_inputs(path)
    return path


@pytest.mark.parametrize(("where", "state"), SWITCHED)
def test_a_switch_beside_the_step_changes_nothing(folder: Path, where: str, state: str) -> None:
    """Two epochs an iteration: the second step is an iteration's last."""
    ranks = run_ranks(_beside_and_after, 2, folder, where, state)
    beside, after = (run.metrics for run in ranks[0])
    assert beside == after
    assert beside[-1] != beside[0]
    assert math.isfinite(beside[0]["val/grad_norm"])
    assert math.isfinite(beside[-1]["policy/grad_norm"])
    skipped = not math.isfinite(beside[0].get("policy/grad_norm", 0.0))
    assert skipped == ("skipped" in state)
    for first, second in ranks:
        assert (first.num_beside, second.num_beside) == (STATES[state][1], 0)
        assert not any(first.held)
        assert all(second.held) or where == "rank 0 to rank 1"  # whose sampling rank trains nothing
    assert len(ranks[1][0].held) == len(beside)
