"""Checkpoints of several trained models, wherever they are: each comes back whole, bit for bit."""

import json
import os
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.distributed import DistributedDataParallelConfig

from puzzle_align.config.saved import open_checkpoint
from puzzle_align.files.checksums import PieceSums
from puzzle_align.layout.plan import ParallelPlan
from puzzle_align.runtime import context as context_module
from puzzle_align.runtime.checkpoint import folder as checkpoint_folder
from puzzle_align.runtime.checkpoint import models as checkpoint
from puzzle_align.runtime.checkpoint import writer as checkpoint_writer
from puzzle_align.runtime.checkpoint.models import Trained, load_checkpoint, save_checkpoint
from puzzle_align.runtime.groups.world import World
from puzzle_align.runtime.optimizer.optimizer import fuse
from puzzle_align.runtime.optimizer.state import parts_of
from tests.dist.several_models import SPECS, Place, build, digest, optimizer_step
from tests.dist.spawn import asked, run_ranks

BOTH = (0, 1)
PLACES = {
    "apart": {"actor": Place((0,)), "critic": Place((1,), distributed=True)},
    "together": {
        "actor": Place(BOTH, ParallelPlan(pipeline=2)),
        "critic": Place(BOTH, ParallelPlan(data=2), distributed=True),
    },
    "overlapping": {
        "actor": Place(BOTH, ParallelPlan(tensor=2)),
        "critic": Place((1,), distributed=True),
    },
    "elsewhere": {"actor": Place((1,)), "critic": Place((1,), distributed=True)},
}
# Saved under, loaded under.
ACROSS = [
    ("apart", "together"),
    ("elsewhere", "overlapping"),
    ("together", "overlapping"),
    # Each the other way round, above or below.
    pytest.param("together", "apart", marks=pytest.mark.slow),
    pytest.param("overlapping", "elsewhere", marks=pytest.mark.slow),
]
STEPS = {"actor": 2, "critic": 3}  # as if the actor waited for the critic to warm up
Seen = dict[str, dict[str, str]]  # on a rank, by role: hashes at the save and a step later


def _seen(models: dict[str, Trained]) -> Seen:
    saved = {role: digest(model) for role, model in models.items()}
    for role, model in models.items():
        optimizer_step(role, model)
    return {role: {"saved": saved[role], "later": digest(models[role])} for role in models}


def _run(rank: int, world_size: int, folder: Path, across: list[tuple[str, str]]) -> dict:
    world = World(rank, world_size, torch.device("cpu"))
    whole, paths = {}, {}
    for name, places in PLACES.items():
        models = build(places, world, seed=1)
        for role, model in models.items():
            for _ in range(STEPS[role]):
                optimizer_step(role, model)
        paths[name] = save_checkpoint(folder / name, 3, {"own": name}, models)
        whole[name] = _seen(models)
    loaded = {}
    for source, target in [*((name, name) for name in PLACES), *across]:
        models = build(PLACES[target], world, seed=2)
        load_checkpoint(open_checkpoint(paths[source]), models)
        loaded[source, target] = _seen(models)
    actor = {
        role: m for role, m in build(PLACES["apart"], world, seed=2).items() if role == "actor"
    }
    load_checkpoint(open_checkpoint(paths["together"]), actor)
    fused = _inner(build(PLACES["together"], world, seed=2), paths["together"])
    return {
        "fused": [group["fused"] for inner in fused for group in inner.param_groups],
        "whole": whole,
        "loaded": loaded,
        "actor": {role: digest(model) for role, model in actor.items()},
    }


def _inner(models: dict[str, Trained], saved: Path) -> list[torch.optim.Optimizer]:
    """Optimizers with a GPU's kernels, which load what another device has saved."""
    parts = [part for model in models.values() for part in parts_of(model.optimizer.megatron)]
    for part in parts:
        fuse(part.optimizer)
    load_checkpoint(open_checkpoint(saved), models)
    return [part.optimizer for part in parts]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("roles")


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest, folder: Path) -> list[dict]:
    across = sorted({("together", "overlapping"), *asked(request, "source", "target")})
    return run_ranks(_run, 2, folder, across)


@pytest.mark.parametrize("name", PLACES)
def test_the_same_placement_loads_bitwise_and_goes_on(ranks: list[dict], name: str) -> None:
    for rank, own in enumerate(ranks):
        held = {role for role, place in PLACES[name].items() if rank in place.ranks}
        assert set(own["whole"][name]) == held
        assert own["loaded"][name, name] == own["whole"][name]


@pytest.mark.parametrize(("source", "target"), ACROSS)
def test_another_placement_loads_bitwise_and_goes_on(
    ranks: list[dict], source: str, target: str
) -> None:
    for own in ranks:
        assert own["loaded"][source, target] == own["whole"][target]


def test_one_of_the_models_loads_alone(ranks: list[dict]) -> None:
    assert ranks[0]["actor"]["actor"] == ranks[0]["whole"]["apart"]["actor"]["saved"]
    assert ranks[1]["actor"] == {}


def test_a_device_keeps_its_kernels_when_it_loads(ranks: list[dict]) -> None:
    for own in ranks:
        assert own["fused"] and all(own["fused"])


@pytest.mark.parametrize("name", PLACES)
def test_every_model_is_described(ranks: list[dict], folder: Path, name: str) -> None:
    job = json.loads((folder / name / "step_00000003/job.json").read_text())
    assert (job["own"], job["step"]) == (name, 3)
    assert list(job["models"]) == ["actor", "critic"]
    for role, place in PLACES[name].items():
        about = job["models"][role]
        assert about["model"]["architectures"] == [
            "Qwen2ForCausalLM" if SPECS[role].head == "lm" else "Qwen2ForSequenceClassification"
        ]
        assert (about["world_size"], about["has_optimizer"]) == (len(place.ranks), True)


def test_buckets_with_padding_load_bitwise(tmp_path: Path) -> None:
    """Of three replicas, whose multiples the parameters' sizes are not; each reads its part."""
    for saved, loaded, share in run_ranks(_save_buckets, 3, tmp_path):
        assert saved == loaded
        assert share < 0.75, share


def _save_buckets(rank: int, world_size: int, folder: Path) -> tuple[str, str, float]:
    """Hashes of what was saved and of what was loaded; the share of bytes that were read."""
    small = partial(DistributedDataParallelConfig, bucket_size=3000)
    context_module.DistributedDataParallelConfig = small
    places = {"actor": Place((0, 1, 2), ParallelPlan(data=3), distributed=True, overlap=True)}
    world = World(rank, world_size, torch.device("cpu"))
    models, others = (build(places, world, seed=seed) for seed in (1, 2))
    for _ in range(2):
        optimizer_step("actor", models["actor"])
    optimizer: Any = models["actor"].optimizer
    *buckets, _ = optimizer.megatron.chained_optimizers[0].buffers[0].buckets
    assert any(one.numel_unpadded < one.grad_data.numel() for one in buckets)
    saved, read = save_checkpoint(folder, 2, {}, models), []
    check = PieceSums.piece_problem

    def checked(self: PieceSums, name: str, at: int, data: bytes) -> str | None:
        read.append(len(data))
        return check(self, name, at, data)

    PieceSums.piece_problem = checked
    load_checkpoint(open_checkpoint(saved), others)
    share = sum(read) / sum(file.stat().st_size for file in saved.glob("*.distcp"))
    return digest(models["actor"]), digest(others["actor"]), share


def test_what_is_no_fault_of_the_disk_is_not_reported_as_one(tmp_path: Path) -> None:
    assert run_ranks(_fail_to_save, 2, tmp_path) == ["CUDA error: of rank 1"] * 2
    assert not list(tmp_path.iterdir())


def _fail_to_save(rank: int, world_size: int, folder: Path) -> str:
    models = build(PLACES["apart"], World(rank, world_size, torch.device("cpu")), seed=1)

    def fail(*_: object) -> int:
        raise RuntimeError(f"CUDA error: of rank {rank}")

    if rank == 1:
        checkpoint_writer._SummedStream.write = fail
    with pytest.raises(RuntimeError) as raised:
        save_checkpoint(folder, 3, {}, models)
    return str(raised.value)


def test_a_rank_that_dies_while_another_publishes_leaves_no_half_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="result0"):  # neither rank ends as ranks do
        run_ranks(_lose_rank_one, 2, tmp_path)
    published = open_checkpoint(tmp_path / "step_00000003")
    published.check()
    for name, sums in published.manifest.files.items():
        assert sums.problem(published.path / name) is None


def _lose_rank_one(rank: int, world_size: int, folder: Path) -> None:
    """Rank 1 dies when its files are there; rank 0 notices while its thread syncs them."""
    models = build(PLACES["apart"], World(rank, world_size, torch.device("cpu")), seed=1)
    gather, sync, gathered = checkpoint.gather_on_rank_zero, checkpoint_folder._sync, []

    def gather_and_die(value: object) -> object:
        gathered.append(gather(value))
        if rank == 1 and len(gathered) == 2:
            os._exit(0)
        return gathered[-1]

    def sync_slowly(path: Path) -> None:
        time.sleep(0.5)
        sync(path)

    checkpoint.gather_on_rank_zero, checkpoint_folder._sync = gather_and_die, sync_slowly
    with pytest.raises(RuntimeError, match="gloo"):
        save_checkpoint(folder, 3, {}, models)
    deadline = time.monotonic() + 30.0
    while not (folder / "step_00000003").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    os._exit(0)
