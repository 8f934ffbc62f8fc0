"""A reference that follows the policy (TR-DPO): its weights by hand, and over a resumed run."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from puzzle_align.config.job import JobConfig
from puzzle_align.config.model_path import ModelPaths
from puzzle_align.config.saved import find_latest
from puzzle_align.config.sections.models import ParallelConfig
from puzzle_align.config.sections.preference import DPOConfig
from puzzle_align.runtime.context import Context
from puzzle_align.runtime.groups.collectives import barrier
from puzzle_align.runtime.groups.world import World
from puzzle_align.stages.dpo import DPOTrainer
from puzzle_align.telemetry import StepStats
from tests.dist.resumed_run import SAVED, STEPS, Case, job, state_hash
from tests.dist.spawn import asked, run_ranks
from tests.jobs import resolved, run_to_end

# Steps between two times by plan: a checkpoint comes after the first one, or (P2) before it.
EVERY, SHARE = {"D2": 2, "T2": 2, "P2": 3}, 0.25
PLANS = {
    "D2": Case("D2", ParallelConfig(), distributed_optimizer=True, skipped=()),
    "T2": Case("T2", ParallelConfig(tensor_model_parallel_size=2), dtype="bf16", skipped=()),
    "P2 tied": Case(
        "P2",
        ParallelConfig(pipeline_model_parallel_size=2),
        tied=True,
        dtype="bf16",
        skipped=(),
    ),
}
NAMES = ["D2", pytest.param("T2", marks=pytest.mark.slow), "P2 tied"]  # every rank means its own
Weights = list[torch.Tensor]


class _Watched(DPOTrainer):
    """Notes every step's loss and both models' weights after it."""

    noted: list[tuple[float, Weights, Weights]]

    def train_step(self, step: int) -> tuple[dict[str, float], StepStats]:
        metrics, stats = super().train_step(step)
        reference = self.models["reference"].context
        assert self.policy is not None
        self.noted.append((metrics["loss"], _weights(self.policy), _weights(reference)))
        return metrics, stats


def _weights(context: Context) -> Weights:
    return [p.detach().clone() for chunk in context.chunks for p in chunk.parameters()]


def _config(case: Case, folder: Path, name: str) -> JobConfig:
    config = job(case, folder, name)
    every = EVERY[case.name]
    dpo = DPOConfig(sync_ref_model=True, ref_model_sync_steps=every, ref_model_mixup_alpha=SHARE)
    return replace(config, dpo=dpo)


def _run(config: JobConfig, rank: int, world_size: int) -> tuple[list, str]:
    world = World(rank, world_size, torch.device("cpu"))
    trainer = _Watched(resolved(config, world_size), world)
    trainer.noted = []
    initial = _weights(trainer.models["reference"].context)
    run_to_end(trainer)
    return [(0.0, initial, initial), *trainer.noted], state_hash(trainer)


def _on_ranks(rank: int, world_size: int, folder: Path, names: list[str]) -> dict[str, Any]:
    found = {}
    for name in names:
        case = PLANS[name]
        whole = _config(case, folder, f"{name} whole")
        found[name, "whole"] = _run(whole, rank, world_size)
        if rank == 0:
            step = f"checkpoints/step_{SAVED:08d}"
            shutil.copytree(Path(whole.output_dir) / step, folder / f"{name} resumed" / step)
        barrier()
        resumed = _config(case, folder, f"{name} resumed")
        found[name, "resumed"] = _run(resumed, rank, world_size)
    return found


@pytest.fixture(scope="module")
def runs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[dict]]:
    folder = tmp_path_factory.mktemp("sync")
    return folder, run_ranks(_on_ranks, 2, folder, sorted(asked(request, "name")))


@pytest.mark.parametrize("name", NAMES)
def test_the_reference_is_a_mean_of_itself_and_the_policy_every_so_many_steps(runs, name) -> None:
    for rank in runs[1]:
        noted, _ = rank[name, "whole"]
        for step in range(1, STEPS + 1):
            (_, _, before), (_, policy, after) = noted[step - 1], noted[step]
            for old, own, new in zip(before, policy, after, strict=True):
                if step % EVERY[PLANS[name].name]:
                    assert torch.equal(new, old)
                else:
                    # TRL's own two operations.
                    assert torch.equal(new, old.clone().mul_(1 - SHARE).add_(own, alpha=SHARE))
        assert any(not torch.equal(a, b) for a, b in zip(noted[0][2], noted[-1][2], strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_a_resumed_run_is_the_whole_one_to_the_bit(runs, name: str) -> None:
    for rank in runs[1]:
        (whole, state), (resumed, resumed_state) = rank[name, "whole"], rank[name, "resumed"]
        assert len(resumed) == STEPS - SAVED + 1
        for (loss, _, reference), (other, _, found) in zip(
            whole[SAVED + 1 :], resumed[1:], strict=True
        ):
            assert loss == other and all(map(torch.equal, reference, found))
        assert state == resumed_state


@pytest.mark.parametrize("name", ["D2"])
def test_a_checkpoint_of_it_has_one_model_for_others(runs, name: str) -> None:
    """Who starts from it takes the policy, for a reference too."""
    checkpoints = runs[0] / f"{name} whole" / "checkpoints"
    saved = find_latest(checkpoints)
    assert saved is not None and list(saved.models) == ["actor"]
    assert list(saved.frozen) == ["reference"] and saved.has_optimizers
    assert ModelPaths().model(str(checkpoints), "reference.model").role == "actor"
    written = json.loads((saved.path / "job.json").read_text())["models"]
    assert written["reference"]["is_frozen"] and "is_frozen" not in written["actor"]
