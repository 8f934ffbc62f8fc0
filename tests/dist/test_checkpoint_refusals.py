"""Checkpoints that a run must refuse: the error is one line, and the good ones stay."""

import os
import resource
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from puzzle_align.commands.prepare import pack_data
from puzzle_align.config.job import JobConfig
from puzzle_align.config.saved import find_latest, open_checkpoint
from puzzle_align.config.sections.data import DataConfig
from puzzle_align.config.sections.models import ParallelConfig
from puzzle_align.config.sections.optimizer import OptimizerConfig
from puzzle_align.runtime.checkpoint import folder as checkpoint_folder
from puzzle_align.runtime.checkpoint import models as checkpoint
from puzzle_align.runtime.groups.collectives import barrier
from puzzle_align.runtime.groups.world import World
from puzzle_align.stages.dpo import DPOTrainer
from puzzle_align.stages.preference import objective
from tests.checkpoints import change_job, flip
from tests.dist.resumed_run import SAVED, STEPS, Case, Numbers, job, run
from tests.dist.spawn import asked, run_ranks
from tests.jobs import resolved
from tests.refusals import refusal

# Both ranks write weights.
CASE = Case("pipeline", ParallelConfig(pipeline_model_parallel_size=2), skipped=())
FIRST = f"step_{SAVED:08d}"
FLIPPED = (STEPS - 1, STEPS)
# Done to a checkpoint that a run is to resume from: halved files, then as if saved before there
# were checksums, before there was such a key, and by a version whose stages have more state.
HARMS: dict[str, Callable[[Path], object]] = {
    **{
        f"damaged{number}": lambda at, file=file: os.truncate(
            at / file, (at / file).stat().st_size // 2
        )
        for number, file in enumerate(("__0_0.distcp", "common.pt", ".metadata"))
    },
    "unsigned": lambda at: (at / "checksums.json").unlink(),
    "older": lambda at: change_job(at, lambda job: job["config"].pop("global_batch_size")),
    "newer": lambda at: change_job(at, lambda job: job["state"].update(more=1)),
}


def _ranks(
    rank: int, world_size: int, folder: Path, full_ranks: tuple[int, ...]
) -> dict[str, object]:
    ranks = (rank, world_size)
    good = job(CASE, folder, "good")
    numbers = {"good": run(CASE, good, *ranks)}
    seen = {
        "unwritable": refusal(lambda: run(CASE, job(CASE, folder, "x", dir="/proc/no"), *ranks)),
        **{
            f"disk{full}": refusal(lambda full=full: _run_out_of_disk(folder, full, *ranks))
            for full in full_ranks
        },
    }
    numbers["after_disk"] = run(CASE, job(CASE, folder, "disk1"), *ranks)
    numbers["stopped"] = _run_until_signal(folder, *ranks)
    numbers["after_stop"] = run(CASE, job(CASE, folder, "stopped"), *ranks)
    numbers["weights_only"] = _run_from_weights(folder, *ranks)
    for name, config in _other_jobs(good).items():
        seen[name] = refusal(lambda config=config: run(CASE, config, *ranks))
    seen["scattered"] = refusal(lambda: _check_scattered(folder, rank))
    for name, harm in HARMS.items():
        seen[name] = refusal(lambda name=name, harm=harm: _run_from(folder, name, harm, *ranks))
    path = folder / "good/checkpoints" / FIRST
    numbers["named"] = run(CASE, job(CASE, folder, "named", resume=str(path)), *ranks)
    numbers["again"] = _run_again(folder, path, *ranks)
    seen["flipped"] = refusal(lambda: _run_flipped(folder, (SAVED, *FLIPPED), *ranks))
    numbers["last_good"] = _run_flipped(folder, FLIPPED[:1], *ranks, cut=FLIPPED[1:])
    seen["named and flipped"] = refusal(lambda: _run_from_named(folder, *ranks))
    seen["unreadable"] = refusal(lambda: _run_unreadable(folder, *ranks))
    seen |= _resumed_with_other_rows(good, folder, *ranks)
    return {**seen, **numbers}


def _other_jobs(good: JobConfig) -> dict[str, JobConfig]:
    return {
        "seed": replace(good, seed=1),
        "batch": replace(good, global_batch_size=4),
        "precision": replace(good, engine=replace(good.engine, dtype="bf16")),
        "beta": replace(good, dpo=replace(good.dpo, beta=0.2)),
        "optimizer": replace(good, optimizer=OptimizerConfig(use_distributed_optimizer=True)),
        "data": replace(good, data=DataConfig(format="synthetic", num_synthetic=72)),
        "steps": replace(good, max_steps=SAVED),
    }


def _run_out_of_disk(folder: Path, full: int, rank: int, world_size: int) -> None:
    """On one rank alone, and only once the first checkpoint is there, of the good run."""
    config = job(CASE, folder, f"disk{full}")
    save = checkpoint.write_state
    if rank == 0:
        first = f"checkpoints/{FIRST}"
        shutil.copytree(folder / "good" / first, folder / f"disk{full}" / first)

    def cramped(*args: Any) -> Any:
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        if rank == full:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
        try:
            return save(*args)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    checkpoint.write_state = cramped
    try:
        run(CASE, config, rank, world_size)
    finally:
        checkpoint.write_state = save
        left = sorted(p.name for p in (folder / f"disk{full}/checkpoints").iterdir())
        assert left == [".lock", FIRST], left


def _resumed_with_other_rows(
    good: JobConfig, folder: Path, rank: int, world_size: int
) -> dict[str, str]:
    """A run on packed files, gone on with from rows of another length, and from the same data."""

    def packed(row_tokens: int) -> JobConfig:
        packing = replace(good.packing, row_tokens=row_tokens)
        data = replace(good.data, format="packed", train=str(folder / f"rows{row_tokens}"))
        place = str(folder / "packed")
        return replace(good, output_dir=place, packing=packing, data=data, max_steps=SAVED)

    first, other = packed(256), packed(192)
    if rank == 0:
        for job_of_rows in (first, other):
            unpacked = replace(job_of_rows, data=good.data)
            pack_data(unpacked, Path(str(job_of_rows.data.train)))
    barrier()
    run(CASE, first, rank, world_size)
    unpacked = replace(first, data=good.data)
    resumed = {"rows": other, "unpacked": unpacked}
    return {
        name: refusal(lambda config=config: run(CASE, config, rank, world_size))
        for name, config in resumed.items()
    }


def _run_until_signal(folder: Path, rank: int, world_size: int) -> Numbers:
    """Rank 1 is asked to stop during step 3, which no save was due after."""
    loss = objective.dpo_losses
    calls = []

    def signalling(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if rank == 1 and len(calls) == SAVED + 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return loss(*args, **kwargs)

    objective.dpo_losses = signalling
    try:
        return run(CASE, job(CASE, folder, "stopped"), rank, world_size)
    finally:
        objective.dpo_losses = loss


def _run_from_weights(folder: Path, rank: int, world_size: int) -> Numbers:
    """In bf16, whose main weights must be made anew from the loaded ones."""
    case = replace(CASE, dtype="bf16", distributed_optimizer=True)
    trained = replace(job(case, folder, "bf16"), max_steps=SAVED)
    run(case, trained, rank, world_size)
    weights = folder / "weights/checkpoints"
    saved = find_latest(folder / "bf16/checkpoints")
    assert saved is not None
    world = World(rank, world_size, torch.device("cpu"))
    trainer = DPOTrainer(resolved(trained, world.size), world)
    assert trainer.policy is not None
    models = {"actor": checkpoint.Trained(trainer.policy, None)}
    checkpoint.load_checkpoint(saved, models)
    with checkpoint_folder.locked(weights, weights):
        checkpoint.save_checkpoint(weights, 0, {"config": {}}, models)
    config = replace(job(case, folder, "weights"), optimizer=OptimizerConfig(lr=0.0, min_lr=0.0))
    return run(case, config, rank, world_size)


def _run_from(
    folder: Path, name: str, harm: Callable[[Path], object], rank: int, world_size: int
) -> None:
    """Resume from a copy of the first checkpoint to which something was done."""
    checkpoint = folder / name / "checkpoints" / FIRST
    if rank == 0:
        shutil.copytree(folder / "good/checkpoints" / FIRST, checkpoint)
        harm(checkpoint)
    run(CASE, job(CASE, folder, name), rank, world_size)


def _run_again(folder: Path, named: Path, rank: int, world_size: int) -> Numbers:
    """Run the command that names a checkpoint again; a bit of its own last one is another."""
    checkpoints = folder / "named/checkpoints"
    last = checkpoints / f"step_{STEPS:08d}"
    if rank == 0:
        flip(last / "__1_0.distcp", (last / "__1_0.distcp").stat().st_size // 2)
    try:
        return run(CASE, job(CASE, folder, "named", resume=str(named)), rank, world_size)
    finally:
        assert (checkpoints / f"damaged_{last.name}").is_dir()


def _run_flipped(
    folder: Path, steps: tuple[int, ...], rank: int, world_size: int, cut: tuple[int, ...] = ()
) -> Numbers:
    """Resume where a bit of the tensors of some steps is another, and those of others are cut."""
    run_folder = folder / f"flipped{len(steps)}"
    checkpoints = run_folder / "checkpoints"
    if rank == 0:
        shutil.copytree(folder / "good/checkpoints", checkpoints)
        for step in steps:
            path = checkpoints / f"step_{step:08d}/__{step % 2}_0.distcp"
            flip(path, path.stat().st_size // 2)
        for step in cut:
            os.truncate(checkpoints / f"step_{step:08d}/__0_0.distcp", 1000)
    try:
        return run(CASE, job(CASE, folder, run_folder.name), rank, world_size)
    finally:
        aside = {path.name for path in checkpoints.glob("damaged_step_*")}
        assert aside == {f"damaged_step_{step:08d}" for step in FLIPPED}, aside


def _run_from_named(folder: Path, rank: int, world_size: int) -> None:
    """Resume from a checkpoint that is named, and has a good one before it."""
    name = "flipped1"
    path = folder / name / f"checkpoints/step_{STEPS:08d}"
    if rank == 0:
        flip(path / "__1_0.distcp", (path / "__1_0.distcp").stat().st_size // 2)
    try:
        run(CASE, job(CASE, folder, name, resume=str(path)), rank, world_size)
    finally:
        assert path.is_dir()


def _run_unreadable(folder: Path, rank: int, world_size: int) -> None:
    """Resume where a file of the last checkpoint is there, and cannot be opened."""
    checkpoints = folder / "unreadable/checkpoints"
    if rank == 0:
        shutil.copytree(folder / "good/checkpoints", checkpoints)
        file = checkpoints / f"step_{STEPS:08d}" / "__1_0.distcp"
        file.unlink()
        file.symlink_to(file.name)
    try:
        run(CASE, job(CASE, folder, "unreadable"), rank, world_size)
    finally:
        assert not list(checkpoints.glob("damaged_*"))


def _check_scattered(folder: Path, rank: int) -> None:
    """Check, as rank 0, a save of which another node kept its file to itself."""
    scratch = folder / f"scattered{rank}"
    shutil.copytree(folder / "good/checkpoints" / FIRST, scratch)
    sums = open_checkpoint(folder / "good/checkpoints" / FIRST).manifest.files
    (scratch / "__1_0.distcp").unlink()
    checkpoint_folder._check_whole(scratch, sums)


@pytest.fixture(scope="module")
def seen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    full_ranks = (0, 1) if "disk0" in asked(request, "what") else (1,)
    return run_ranks(_ranks, 2, tmp_path_factory.mktemp("runs"), full_ranks)


FULL = ["step_00000004 could not be written", "File too large", "free space"]


@pytest.mark.parametrize(
    ("what", "parts"),
    [
        ("unwritable", ["/proc/no ", "cannot be written", "checkpoint.dir"]),
        ("disk1", FULL),
        pytest.param("disk0", FULL, marks=pytest.mark.slow),  # whichever rank it is
        *(
            (f"damaged{number}", [FIRST, "damaged or incomplete", "to start anew"])
            for number in range(3)
        ),
        (
            "flipped",
            [FIRST, "has another checksum than when it was made", "to start anew"],
        ),
        ("named and flipped", ["has another checksum", "set checkpoint.resume=auto, which takes"]),
        ("unreadable", ["step_00000005 cannot be read now (__1_0.distcp: Too many levels", "same"]),
        ("unsigned", [FIRST, "checksums.json is missing", "to start anew"]),
        ("seed", ["seed is 1, but 42"]),
        ("batch", ["global_batch_size is 4, but 8"]),
        ("beta", ["dpo.beta is 0.2, but 0.1"]),
        ("older", [FIRST, "global_batch_size is 8, but unknown", "another output_dir"]),
        ("newer", [f"{FIRST} is not what this version saves (job.json.state", "left as it is"]),
        ("precision", ["engine.dtype is bf16, but fp32", "another output_dir"]),
        ("scattered", ["1 of the checkpoint's files", "all nodes share"]),
        ("optimizer", ["use_distributed_optimizer is true, but false"]),
        ("data", ["was trained on other data", "; data.num_synthetic is 72, but "]),
        ("rows", ["packing.row_tokens is 192, but 256"]),
        ("unpacked", ["data.format is synthetic, but packed"]),
        ("steps", ["is at step 5, past the job's 2 steps"]),
    ],
)
def test_one_line_says_what_and_the_cure(seen: list[dict], what: str, parts: list[str]) -> None:
    for rank in seen:
        assert all(part in rank[what] for part in parts), rank[what]


def test_a_full_disk_costs_only_the_steps_since_the_last_checkpoint(seen: list[dict]) -> None:
    for rank in seen:
        assert rank["after_disk"] == rank["good"].since(SAVED)


def test_from_the_last_good_one_or_a_named_one_a_run_goes_on_bitwise(
    seen: list[dict],
) -> None:
    for rank in seen:
        assert rank["last_good"] == rank["named"] == rank["good"].since(SAVED)
        assert rank["again"] == rank["good"].since(STEPS - 1)


def test_a_signal_to_one_rank_stops_all_after_the_step_and_loses_nothing(seen: list[dict]) -> None:
    for rank in seen:
        assert rank["stopped"].steps == rank["good"].steps[: SAVED + 1]
        assert rank["after_stop"] == rank["good"].since(SAVED + 1)


def test_weights_alone_are_a_start(seen: list[dict]) -> None:
    for rank in seen:
        assert len(rank["weights_only"].steps) == STEPS
        # With no learning rate the reloaded main weights must leave the policy where it was.
        assert all(step["rewards/margins"] != 0.0 for step in rank["weights_only"].steps)


def test_a_folder_in_use_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_folder, "_LOCK_WAIT_S", 0.3)
    monkeypatch.setattr(checkpoint_folder, "from_rank_zero", lambda make: make())
    output_dir, checkpoints = tmp_path / "run", tmp_path / "run/checkpoints"
    told = rf"/run is in use by another run .process {os.getpid()} on .*another output_dir$"
    with checkpoint_folder.locked(output_dir, checkpoints):
        for folders, words in (
            ((output_dir, tmp_path / "elsewhere"), told),
            ((tmp_path / "elsewhere", checkpoints), r"checkpoints is in use .*checkpoint.dir or o"),
        ):
            with pytest.raises(ValueError, match=words), checkpoint_folder.locked(*folders):
                pass
    (checkpoints / ".saving_step_00000001_0").mkdir()
    with checkpoint_folder.locked(checkpoints, checkpoints):
        assert [path.name for path in checkpoints.iterdir()] == [".lock"]
