"""The training loop where updates fail: what it saves, where it ends, and that all ranks agree."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from puzzle_align.config.sections.output import CheckpointConfig
from puzzle_align.runtime.groups.world import World
from puzzle_align.runtime.liveness.failure import CannotGoOn
from puzzle_align.stages.divergence import Update
from puzzle_align.telemetry import StepStats
from tests.dist.spawn import run_ranks
from tests.dist.test_loop_roles import _job, _Trainer, run_on

STEPS, LIMIT = 6, 2
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


class _Diverging(_Trainer):
    """Its models learn as told; only rank 1 knows of the actor's updates."""

    num_steps = STEPS

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


def _runs(rank: int, world_size: int, folder: Path) -> dict[str, str]:
    world = World(rank, world_size, torch.device("cpu"))
    said = {}
    for name, fates in RUNS.items():
        job = _job(folder, name)
        optimizer = replace(job.optimizer, max_skipped_steps=LIMIT)
        saves = CheckpointConfig(save_every=3, keep_last=0)
        if "kept" in name or "each" in name:
            saves = CheckpointConfig(save_every=1, keep_last=1)
        config = replace(job, optimizer=optimizer, checkpoint=saves)
        try:
            run_on(config, _Diverging(world, fates))
            said[name] = ""
        except CannotGoOn as error:
            said[name] = str(error)
    return said


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("diverging")


@pytest.fixture(scope="module")
def said(folder: Path) -> list[dict[str, str]]:
    return run_ranks(_runs, 2, folder)


@pytest.mark.parametrize(
    ("name", "saved", "line"),
    [
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
    ],
)
def test_a_step_that_fails_is_not_saved(folder, said, name, saved, line) -> None:
    found = [path.name for path in sorted((folder / name / "checkpoints").glob("step_*"))]
    assert found == [f"step_{step:08d}" for step in saved]
    first, second = (rank[name] for rank in said)
    if line is None:
        assert first == second == ""
        return
    last = (
        f"the last checkpoint is {folder}/{name}/checkpoints/step_{saved[-1]:08d}" if saved else ""
    )
    assert first == second  # whichever of them speaks
    assert first.endswith(last or "no step was saved")
    assert line in first and len(first) < 600


@pytest.mark.parametrize(
    ("name", "kept", "line"),
    [
        ("each saved", [5, 6], ""),
        ("one kept, the last two", [3, 4], "move it away to resume from step_00000003"),
        ("one kept, too many", [2, 3], "move it away to resume from step_00000002"),
        ("one kept, the last one", [4, 5, 6], ""),
    ],
)
def test_the_last_two_are_kept_and_none_is_deleted_at_a_step_that_fails(
    folder: Path, said: list[dict[str, str]], name: str, kept: list[int], line: str
) -> None:
    """The last checkpoint may have weights that the last update threw far off."""
    found = [path.name for path in sorted((folder / name / "checkpoints").glob("step_*"))]
    assert found == [f"step_{step:08d}" for step in kept]
    assert all(line in rank[name] and bool(line) == bool(rank[name]) for rank in said)
