"""Costs of a job's actions are rank 0's, whatever profile the other nodes have; their parts."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from puzzle_align.config.load import find_config, load_file
from puzzle_align.layout.model import ModelOptions
from puzzle_align.layout.plan import ParallelPlan
from puzzle_align.planning.costs.profile import save_profile
from puzzle_align.schedules.costs import ModelCosts
from puzzle_align.stages.costs import costs_everywhere, job_costs, predicted_run, spread
from tests.declared import tiny_profile
from tests.dist.spawn import run_ranks
from tests.jobs import job_plan
from tests.refusals import refusal

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


@pytest.mark.parametrize("measured", [False, True])
def test_transfers_take_time_where_they_were_measured(measured: bool, tmp_path: Path) -> None:
    """By FLOPs costs are relative, and a model that only scores has no backward either way."""
    given = ["actor.parallel.pipeline_model_parallel_size=2"]
    if measured:
        profile = tiny_profile(load_file(find_config("ppo_tiny")))
        save_profile(profile, tmp_path / "profile.json")
        given.append(f"placement.profile={tmp_path}/profile.json")
    job = load_file(find_config("ppo_tiny"), given)
    costs, plan = job_costs(job), job_plan(job, ModelOptions(), 2)
    learn, score = (predicted_run(costs, plan.phase(name), {}, 3) for name in ("learn", "score"))
    assert learn.num_passes == 3
    assert all(role.backward for role in learn.costs.values())
    assert not any(role.backward for role in score.costs.values())
    if measured:
        assert callable(learn.transfer) and learn.transfer("actor", 0, 1) > 0
    else:
        assert learn.transfer == 0.0


def test_what_is_no_profile_is_named(tmp_path: Path) -> None:
    (tmp_path / "profile.json").write_text("[]")
    named = [f"placement.profile={tmp_path}/profile.json"]
    job = load_file(find_config("ppo_tiny"), named)
    assert refusal(lambda: job_costs(job)).startswith("placement.profile: ")


def test_rows_are_spread_in_whole_groups_of_an_interleaved_pipeline() -> None:
    """Of five rows: each of two replicas has three, or four where they come in twos."""
    plan = ParallelPlan(data=2)
    assert [spread(rows, plan) for rows in (4, 5)] == [2, 3]
    interleaved = replace(plan, pipeline=2, virtual_pipeline=2)
    assert [spread(rows, interleaved) for rows in (4, 5)] == [2, 4]
