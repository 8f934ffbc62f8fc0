"""A stage that starts from another's checkpoint: as from what convert makes of it, bit for bit."""

import os
import re
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from puzzle_align.commands import convert
from puzzle_align.config.job import JobConfig
from puzzle_align.config.load import load_job
from puzzle_align.config.sections.optimizer import OptimizerConfig
from puzzle_align.layout.job_plan import ContextPlan
from puzzle_align.layout.model import Dtype, ModelOptions, ModelSpec, with_scalar_head
from puzzle_align.layout.plan import ParallelPlan
from puzzle_align.runtime.checkpoint import reader as checkpoint_reader
from puzzle_align.runtime.checkpoint.models import Trained, save_checkpoint
from puzzle_align.runtime.groups.world import World, build_communicators
from puzzle_align.stages.models import open_context
from puzzle_align.stages.preference.reference_table import model_fingerprint
from puzzle_align.stages.weights import Weights, role_weights
from tests.checkpoints import change_job, flip, reseal
from tests.dist.random_models import random_context, trainable
from tests.dist.spawn import run_alone, run_ranks
from tests.jobs import model_of
from tests.refusals import refusal
from tests.specs import LLAMA, TIED

P2, D2, T2 = ParallelPlan(pipeline=2), ParallelPlan(data=2), ParallelPlan(tensor=2)
UNEVEN = ParallelPlan(pipeline=2, pipeline_layers=(1, 3))
CHUNKS = ParallelPlan(pipeline=2, virtual_pipeline=2)
SEQUENCE = ParallelPlan(tensor=2, sequence_parallel=True)
# By stage, what is saved: the role, its model, its plan, its precision.
SAVED: dict[str, tuple[str, ModelSpec, ParallelPlan, Dtype]] = {
    "reward": ("reward", with_scalar_head(TIED), P2, "fp32"),
    "dpo": ("actor", TIED, T2, "fp32"),
    "bf16": ("actor", LLAMA, UNEVEN, "bf16"),
}
# The role, which checkpoint it starts from, under which plan, in which precision.
STARTS: list[tuple[str, str, ParallelPlan, Dtype]] = [
    ("critic", "reward", T2, "fp32"),
    ("reward", "reward", D2, "fp32"),
    ("critic", "reward", UNEVEN, "bf16"),
    ("actor", "dpo", P2, "fp32"),
    ("reference", "dpo", CHUNKS, "fp32"),
    ("critic", "dpo", P2, "fp32"),  # with a new head
    ("actor", "bf16", SEQUENCE, "fp32"),
    ("reference", "bf16", P2, "bf16"),
    ("critic", "bf16", UNEVEN, "fp32"),
]
NAMES = ["-".join((role, source, str(plan), dtype)) for role, source, plan, dtype in STARTS]
Values = dict[str, torch.Tensor]


def _save(rank: int, world_size: int, folder: Path) -> None:
    world = World(rank, world_size, torch.device("cpu"))
    for name, (role, spec, plan, dtype) in SAVED.items():
        context = random_context(spec, plan, world, seed=3, role=role, dtype=dtype)
        for parameter in (own for chunk in context.chunks for own in chunk.parameters()):
            parameter.data += 0.25 * parameter.data**3  # trained, as it were; padding stays zero
        config = OptimizerConfig(max_grad_norm=0.0, use_distributed_optimizer=True)
        model = Trained(context, trainable(context, config))
        stage = "reward" if role == "reward" else "dpo"
        job = {"config": asdict(JobConfig(stage=stage))}
        save_checkpoint(folder / name / "checkpoints", 7, job, {role: model})


def _convert(folder: Path) -> None:
    for name in SAVED:
        convert.to_hf(folder / name, folder / name / "hf")


def _job(role: str, path: Path) -> JobConfig:
    return load_job("stage: ppo", [f"{role}.model.path={path}", "tokenizer.path=byte", "seed=5"])


def _weights(job: JobConfig, role: str) -> Weights:
    return role_weights(model_of(job, role), job)


def _frozen(
    job: JobConfig,
    role: str,
    *,
    ranks: tuple[int, ...] = (0,),
    plan: ParallelPlan = ParallelPlan(),  # noqa: B008 - frozen
    dtype: Dtype = "fp32",
) -> ContextPlan:
    return ContextPlan(
        role=role,
        workload="infer",
        model=model_of(job, role).spec,
        options=ModelOptions(dtype=dtype),
        plan=plan,
        ranks=ranks,
    )


def _started(start: tuple[str, str, ParallelPlan, Dtype], path: Path, world: World) -> Values:
    """The weights on this rank of a model that starts from ``path``."""
    role, _, plan, dtype = start
    job = _job(role, path)
    context = _frozen(job, role, ranks=(0, 1), plan=plan, dtype=dtype)
    weights = _weights(job, role)
    weights.check()
    return {
        f"{number}.{name}": value.detach().clone()
        for number, chunk in enumerate(open_context(weights, context, world).chunks)
        for name, value in chunk.named_parameters()
    }


def _start(rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    world, found, num_read = World(rank, world_size, torch.device("cpu")), {}, {}
    read = _count_what_is_read()
    for name, start in zip(NAMES, STARTS, strict=True):
        at = folder / start[1]
        read.clear()
        both = [_started(start, path, world) for path in (at, at / "hf")]
        num_read[name] = sum(read)
        assert both[0].keys() == both[1].keys()
        found[name] = {key: (value, both[1][key]) for key, value in both[0].items()}
    # On ranks of their own, each reads another checkpoint, and one more than the other does.
    role, source = (("critic", "reward"), ("actor", "dpo"))[rank]
    groups = [build_communicators(ParallelPlan(), world, (own,), trained=False) for own in (0, 1)]
    job = _job(role, folder / source)
    alone = _frozen(job, role, ranks=(rank,))
    for _ in range(1 + rank):
        weights = _weights(job, role)
        chunks = open_context(weights, alone, world, groups[rank]).chunks
    alone_sum = float(next(chunks[0].parameters()).detach().abs().sum())
    torn = _torn(folder, world)
    return {"starts": found, "read": num_read, "alone": alone_sum, "torn": torn}


def _count_what_is_read() -> list[int]:
    """The elements that this rank takes from checkpoints from now on, box by box."""
    sizes: list[int] = []
    plan_of = checkpoint_reader.MCoreLoadPlanner.create_local_plan

    def counting(self: Any) -> Any:
        plan = plan_of(self)
        sizes.extend(item.lengths.numel() for item in plan.items)
        return plan

    checkpoint_reader.MCoreLoadPlanner.create_local_plan = counting
    return sizes


def _torn(folder: Path, world: World) -> str:
    """Error about files of the right length that hold something else."""
    step = folder / f"torn{world.rank}"
    shutil.copytree(folder / "reward/checkpoints/step_00000007", step)
    for file in step.glob("*.distcp"):
        file.write_bytes(bytes(file.stat().st_size))
    return refusal(lambda: _started(("critic", "", T2, "fp32"), step, world))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("handover")
    run_ranks(_save, 2, folder)
    run_alone(_convert, folder)
    return folder


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[dict[str, Any]]:
    return run_ranks(_start, 2, folder)


@pytest.mark.parametrize("name", NAMES)
def test_weights_are_those_of_the_converted_checkpoint(
    ranks: list[dict[str, Any]], name: str
) -> None:
    for rank in ranks:
        assert rank["starts"][name]
        for key, (own, converted) in rank["starts"][name].items():
            assert own.dtype == converted.dtype
            assert own.abs().sum() > 0, key
            assert torch.equal(own, converted), key


@pytest.mark.parametrize(("name", "start"), [*zip(NAMES, STARTS, strict=True)])
def test_a_rank_takes_what_it_holds_and_no_more(
    ranks: list[dict[str, Any]], name: str, start: tuple[str, str, ParallelPlan, Dtype]
) -> None:
    for rank in ranks:
        held = {key: own.numel() for key, (own, _) in rank["starts"][name].items()}
        if start[0] == "critic" and start[1] != "reward":  # its head is new
            held.pop("0.output_layer.weight", None)
        assert rank["read"][name] == sum(held.values())


def test_torn_files_are_one_line(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert "is damaged or incomplete (" in rank["torn"], rank["torn"]


def test_ranks_do_not_wait_for_each_other(ranks: list[dict[str, Any]]) -> None:
    assert all(rank["alone"] > 0 for rank in ranks)


def _fingerprint(path: Path) -> str:
    job = _job("reference", path)
    return model_fingerprint(_frozen(job, "reference"), _weights(job, "reference"))


def test_a_fingerprint_is_of_the_weights_alone(folder: Path, tmp_path: Path) -> None:
    first = _fingerprint(folder / "dpo")
    step = shutil.copytree(folder / "dpo/checkpoints/step_00000007", tmp_path / "copy")
    assert _fingerprint(step) == first != _fingerprint(folder / "bf16")
    change_job(step, lambda job: job.update(step=9))
    assert _fingerprint(step) == first
    job = _job("reference", step)
    weights: Any = _weights(job, "reference")
    keys, stored = weights._shapes(), weights._metadata.storage_data.items()
    info = next(info for index, info in stored if index.fqn in keys)
    flip(step / info.relative_path, info.offset + info.length - 200)
    reseal(step)
    assert _fingerprint(step) != first


@pytest.mark.parametrize("file", ["__0_0.distcp", "__1_0.distcp", ".metadata"])
def test_damage_is_found_before_anything_is_built(folder: Path, tmp_path: Path, file: str) -> None:
    step = shutil.copytree(folder / "reward/checkpoints/step_00000007", tmp_path / "copy")
    job = _job("reward", step)
    weights = _weights(job, "reward")
    weights.check()
    os.truncate(step / file, 1000)
    message = refusal(lambda: _weights(job, "reward").check())
    assert re.search(f"{step} is damaged or incomplete .*: take another", message), message
    (step / file).unlink()
    assert "is damaged or incomplete" in refusal(lambda: _weights(job, "reward").check())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 64}, r"word_embeddings.weight has shape \(128, 32\), job.json .*128, 64"),
        ({"num_hidden_layers": 3}, r"layers.\S+ has shape \(4, .+?\), job.json asks for \(3, "),
        ({"model_type": "qwen2", "head_dim": 8}, "linear_proj.weight has shape"),
    ],
)
def test_a_model_of_other_dimensions_is_refused(
    folder: Path, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    step = shutil.copytree(folder / "reward/checkpoints/step_00000007", tmp_path / "copy")
    change_job(step, lambda job: job["models"]["reward"]["model"].update(change))
    job = _job("reward", step)
    line = refusal(lambda: _weights(job, "reward").check())
    assert re.search(message, line), line
