"""The memory of communicators in a job's estimate."""

from puzzle_align.config.load import find_config, load_file
from puzzle_align.config.placement import job_plan
from puzzle_align.layout.groups import Communicators, num_communicators
from puzzle_align.layout.model import ModelOptions
from puzzle_align.planning.communicators import (
    GROUP_BYTES,
    LINK_BYTES,
    communicator_bytes,
    with_communicators,
)


def test_two_models_on_eight_by_eight_ranks():
    """Of an inner rank: all ranks, a tensor group and a pipeline that both models share, and links:
    the actor's both ways to both neighbours, the reference's one way."""
    shape = "actor.parallel.pipeline_model_parallel_size=8"
    tensor = "actor.parallel.tensor_model_parallel_size=8"
    heads = "actor.model.config.num_attention_heads=8"
    groups = "actor.model.config.num_key_value_heads=8"
    layers = "actor.model.config.num_hidden_layers=8"
    job = load_file(find_config("dpo_tiny"), [shape, tensor, heads, groups, layers])
    plan = job_plan(job, ModelOptions(), 64)
    assert num_communicators(plan, 8) == Communicators(groups=3, links=4 + 2)
    # At the pipeline's ends half of the neighbours are missing, and there is the group of both.
    assert num_communicators(plan, 0) == Communicators(groups=4, links=2 + 1)
    assert communicator_bytes(plan, 8) == 3 * GROUP_BYTES + 6 * LINK_BYTES
    columns = {"0": {"weights": 5, "total": 7}, "8,16": {"weights": 6, "total": 9}}
    found = with_communicators(plan, columns)
    added = communicator_bytes(plan, 8)
    assert found["8,16"] == {"weights": 6, "communicators": added, "total": 9 + added}
    assert list(found["0"]) == ["weights", "communicators", "total"]
