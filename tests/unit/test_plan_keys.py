"""Every plan that the planner can choose is one that a config's keys say."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from puzzle_align.config.check import problems
from puzzle_align.config.load import Decided, find_config, load_file
from puzzle_align.config.placement import job_plan
from puzzle_align.planning.plan_keys import plan_keys
from puzzle_align.planning.search.evaluation import evaluate
from puzzle_align.planning.search.space import Choice, Sampling, Space
from tests.declared import tiny_profile, tiny_space

FEW = ("data.num_synthetic=200", "telemetry.progress=false")


def samplings(space: Space, choice: Choice) -> Iterator[Sampling | None]:
    """One of every plan that the actor can sample under beside a choice."""
    if not space.job.samples:
        yield None
        return
    for number in {len(choice.context("actor").ranks), space.cluster.num_ranks}:
        yield from {sampling.plan: sampling for sampling in space.samplings(number)}.values()


@pytest.mark.parametrize(
    ("name", "num_ranks", "overrides"),
    [
        ("dpo_tiny", 1, []),
        ("dpo_tiny", 3, []),
        ("dpo_tiny", 4, []),
        ("dpo_tiny", 4, ["dpo.reference_free=true"]),
        ("kto_tiny", 3, []),
        ("kto_tiny", 2, ["kto.loss_type=apo_zero_unpaired"]),
        ("reward_tiny", 4, []),
        ("ppo_tiny", 2, []),
        ("ppo_tiny", 3, ["ppo.kl_coef=0"]),
    ],
)
def test_the_keys_of_every_plan_make_that_plan(
    name: str, num_ranks: int, overrides: list[str], tmp_path: Path
) -> None:
    given = [*FEW, f"output_dir={tmp_path}", *overrides]
    path = find_config(name)
    profile = tiny_profile(load_file(path, given))
    space = tiny_space(name, num_ranks, given, profile)
    modes = set()
    for choice in space.choices():
        for sampling in samplings(space, choice):
            planned = evaluate(space, space.times, choice, sampling)
            keys = plan_keys(planned.plan, planned.settings, space.job.options, "cpu")
            job = load_file(path, given, Decided("the plan", keys))
            assert problems(job, num_ranks) == []
            assert job_plan(job, space.job.options, num_ranks) == planned.plan
            assert job.packing.row_tokens == planned.settings.row_tokens
            modes.add(choice.mode)
    if name == "ppo_tiny":
        assert modes == {"colocated", "apart"}
    if name == "kto_tiny":
        assert modes == {"colocated", "apart", "another grid"} | (
            {"before"} if overrides else set()
        )
    if name == "dpo_tiny" and num_ranks == 4 and "dpo.reference_free=true" not in overrides:
        assert modes == {"colocated", "apart", "before", "another grid"}
