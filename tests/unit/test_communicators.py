"""The memory of communicators in a job's estimate."""

import time

from hypothesis import given, settings

from puzzle_align.config.load import find_config, load_file
from puzzle_align.layout.groups import CommunicatorCounts, groups_of, link_hops, num_communicators
from puzzle_align.layout.job_plan import JobPlan
from puzzle_align.layout.model import ModelOptions
from puzzle_align.planning.memory.job import (
    CUDA_BYTES,
    GROUP_BYTES,
    LINK_BYTES,
    communicator_bytes,
    with_cuda,
)
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
    columns = {"0": {"weights": 5, "total": 7}, "8,16": {"weights": 6, "total": 9}}
    found = with_cuda(plan, columns)
    added = communicator_bytes(num_communicators(plan)[8])
    both = {"CUDA": CUDA_BYTES, "communicators": added}
    assert found["8,16"] == {"weights": 6, **both, "total": 9 + CUDA_BYTES + added}
    assert list(found["0"]) == ["weights", "CUDA", "communicators", "total"]


@settings(max_examples=25)
@given(plan=job_plans())
def test_all_ranks_at_once_are_what_they_are_one_by_one(plan: JobPlan) -> None:
    def alone(rank: int) -> CommunicatorCounts:
        groups = groups_of(plan, rank)
        shared = {group.ranks for group in groups if not group.is_link}
        shared.add(tuple(range(plan.world_size)))
        hops = [hop for g in groups if g.is_link for hop in link_hops(g.link, g.ranks)]
        return CommunicatorCounts(
            sum(len(ranks) > 1 for ranks in shared), sum(rank in hop for hop in hops)
        )

    assert num_communicators(plan) == [alone(rank) for rank in range(plan.world_size)]


def test_a_column_has_what_its_last_rank_has_however_many_there_are() -> None:
    """On 16,384 ranks within seconds: the last half has the critic's groups, too."""
    overrides = ["actor.ranks=0-16383", "critic.ranks=8192-16383", "global_batch_size=16384"]
    job = load_file(find_config("ppo_tiny"), overrides)
    start = time.process_time()
    plan = job_plan(job, ModelOptions(), 2**14)
    found = with_cuda(plan, {"0-16383": {"total": 1}, "0-8191": {"total": 1}})
    assert time.process_time() - start < 5
    more, less = (parts["communicators"] for parts in found.values())
    assert less == GROUP_BYTES and more == 2 * GROUP_BYTES
