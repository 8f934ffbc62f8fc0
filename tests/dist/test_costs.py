"""Costs of a job's actions are rank 0's, whatever profile the other nodes have."""

import os
from dataclasses import replace
from pathlib import Path

from puzzle_align.config.load import find_config, load_file
from puzzle_align.layout.model import ModelOptions
from puzzle_align.planning.costs.profile import save_profile
from puzzle_align.schedules.costs import ModelCosts
from puzzle_align.stages.costs import costs_everywhere
from tests.declared import tiny_profile
from tests.dist.spawn import run_ranks
from tests.jobs import job_plan

TENSOR = "actor.parallel.tensor_model_parallel_size=2"


def _costs(rank: int, _world_size: int, folder: Path) -> dict[str, ModelCosts]:
    os.chdir(folder / f"node{rank}")
    job = load_file(find_config("ppo_tiny"), ["placement.profile=profile.json", TENSOR])
    plan = job_plan(job, ModelOptions(), 2)
    return dict(costs_everywhere(job).of(plan.phase("learn").contexts))


def test_all_ranks_have_the_costs_of_one_profile(tmp_path: Path) -> None:
    """With each its own, they would make other schedules, and wait for one another for ever."""
    profile = tiny_profile(load_file(find_config("ppo_tiny")))
    first, *others = profile.models
    slow = [
        replace(point, backward=replace(point.backward, median=9.0 * point.backward.median))
        for point in first.rows
    ]
    older = replace(profile, models=(replace(first, rows=tuple(slow)), *others))
    for node, each in enumerate((profile, older)):
        (tmp_path / f"node{node}").mkdir()
        save_profile(each, tmp_path / f"node{node}/profile.json")
    one, other = run_ranks(_costs, 2, tmp_path)
    (alone,) = run_ranks(_costs, 1, tmp_path)
    assert one == other == alone and set(one) == {"actor", "critic"}
