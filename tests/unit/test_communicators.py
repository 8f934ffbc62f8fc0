"""The memory of communicators in a job's estimate."""

import time
from math import prod

import pytest
from hypothesis import given, settings

from puzzle_align.config.job import JobConfig
from puzzle_align.config.load import find_config, load_file
from puzzle_align.layout.groups import CommunicatorCounts, groups_of, link_hops, num_communicators
from puzzle_align.layout.job_plan import JobPlan, Settings
from puzzle_align.layout.model import Fusions, ModelOptions
from puzzle_align.planning.memory.job import (
    CUDA_BYTES,
    GROUP_BYTES,
    LINK_BYTES,
    communicator_bytes,
    estimate_memory,
    ranks_named,
)
from puzzle_align.stages.banner import memory_inputs
from puzzle_align.stages.outlook import open_outlook
from tests.jobs import job_plan
from tests.unit.job_plan_strategies import job_plans


def test_two_models_on_eight_by_eight_ranks():
    """An inner rank has: all ranks, a tensor group and a pipeline of both models, and links:
    the actor's both ways to both neighbours, the reference's one way."""
    shape = "actor.parallel.pipeline_model_parallel_size=8"
    tensor = "actor.parallel.tensor_model_parallel_size=8"
    heads = "actor.model.config.num_attention_heads=8"
    groups = "actor.model.config.num_key_value_heads=8"
    layers = "actor.model.config.num_hidden_layers=8"
    job = load_file(find_config("dpo_tiny"), [shape, tensor, heads, groups, layers])
    plan = job_plan(job, ModelOptions(), 64)
    assert num_communicators(plan)[8] == CommunicatorCounts(groups=3, links=4 + 2)
    # At the pipeline's ends half of the neighbours are missing, and there is the group of both.
    assert num_communicators(plan)[0] == CommunicatorCounts(groups=4, links=2 + 1)
    assert communicator_bytes(num_communicators(plan)[8]) == 3 * GROUP_BYTES + 6 * LINK_BYTES
    without, found = (_columns(job, plan, cuda=cuda) for cuda in (False, True))
    assert len(found) == 8
    for name, parts in found.items():
        rank = ranks_named(name, "", 64)[0]
        added = communicator_bytes(num_communicators(plan)[rank])
        own = (512 + 32 + 32) * 2**20  # a context, workspaces of cuBLAS and Transformer Engine
        total = without[name].pop("total") + own + added
        cuda = {"CUDA": own, "communicators": added}
        assert list(parts.items()) == list({**without[name], **cuda, "total": total}.items())


@pytest.mark.parametrize(
    ("fused", "is_adapted", "share"), [(True, False, 1), (False, False, 0), (True, True, 0)]
)
def test_gradients_that_transformer_engine_returns_are_counted_once_a_shape(
    fused: bool, is_adapted: bool, share: int
) -> None:
    job = load_file(find_config("dpo_tiny"), ["actor.lora.r=2"] * is_adapted)  # in float32
    shapes = ((256, 128), (128, 128), (768, 128), (128, 384))  # its projections
    fusions = Fusions(gradient_accumulation_fusion=fused)
    plan = job_plan(job, ModelOptions(fusions=fusions), 2)
    for parts in _columns(job, plan, cuda=True).values():
        assert parts["CUDA"] == CUDA_BYTES + share * 4 * sum(map(prod, shapes))


def _columns(job: JobConfig, plan: JobPlan, *, cuda: bool) -> dict[str, dict[str, int]]:
    preview = open_outlook(job).preview(plan, None, [])
    settings = Settings(row_tokens=job.packing.row_tokens)
    return estimate_memory(plan, memory_inputs(settings, preview, cuda=cuda))


@settings(max_examples=12)
@given(plan=job_plans())
def test_all_ranks_at_once_are_what_they_are_one_by_one(plan: JobPlan) -> None:
    def alone(rank: int) -> CommunicatorCounts:
        groups = groups_of(plan, rank)
        shared = {group.ranks for group in groups if not group.is_link}
        shared.add(tuple(range(plan.world_size)))
        hops = [hop for g in groups if g.is_link for hop in link_hops(g.name.split()[0], g.ranks)]
        return CommunicatorCounts(
            sum(len(ranks) > 1 for ranks in shared), sum(rank in hop for hop in hops)
        )

    assert num_communicators(plan) == [alone(rank) for rank in range(plan.world_size)]


def test_memory_is_estimated_within_seconds_however_many_ranks_there_are() -> None:
    """Of 16,384 ranks the last half has the critic's group, too."""
    overrides = ["actor.ranks=0-16383", "critic.ranks=8192-16383", "global_batch_size=16384"]
    job = load_file(find_config("ppo_tiny"), overrides)
    start = time.process_time()
    plan = job_plan(job, ModelOptions(), 2**14)
    found = _columns(job, plan, cuda=True)
    assert time.process_time() - start < 5
    added = {ranks: parts["communicators"] for ranks, parts in found.items()}
    assert added == {"0-8191": GROUP_BYTES, "8192-16383": 2 * GROUP_BYTES}
