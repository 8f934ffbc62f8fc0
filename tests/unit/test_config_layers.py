"""Layers along the pipeline as configs give them, and what is said where they do not fit."""

import json

import pytest

from puzzle_align.config.check import generation_problems
from puzzle_align.config.load import load_job
from puzzle_align.config.resolution import Resolution
from puzzle_align.layout.model import ModelOptions
from puzzle_align.layout.plan import ParallelPlan
from tests.jobs import job_plan, problems_of
from tests.specs import CONFIG

DEEP = {"intermediate_size": 160, "num_hidden_layers": 32, "num_key_value_heads": 4}
MODEL = {**CONFIG, **DEEP, "vocab_size": 512}
PP, VPP, LAYERS = (
    f"actor.parallel.{name}"
    for name in (
        "pipeline_model_parallel_size",
        "virtual_pipeline_model_parallel_size",
        "pipeline_layers",
    )
)


def job(*overrides: str, **model: int):
    config = f"actor.model.config={json.dumps({**MODEL, **model})}"
    return load_job("data: {format: synthetic}", [config, *overrides])


def plan_of(*overrides: str, ranks: int = 4, role: str = "actor", **model: int) -> ParallelPlan:
    made = job(*overrides, **model)
    assert problems_of(made, ranks) == []
    return Resolution(made, ranks).plan.models[role].plan


def test_nothing_said_is_even_where_that_can_be_and_balanced_where_not() -> None:
    assert plan_of(f"{PP}=4") == ParallelPlan(pipeline=4)
    assert plan_of(f"{PP}=4", num_hidden_layers=30).pipeline_layers == (7, 8, 8, 7)
    assert plan_of(f"{PP}=2", f"{VPP}=2", ranks=2, num_hidden_layers=7).pipeline_layers == (
        (2, 2, 2, 1)
    )


def test_auto_counts_the_head_also_where_even_could_be() -> None:
    assert plan_of(f"{PP}=4", f"{LAYERS}=auto") == ParallelPlan(pipeline=4)  # a small one
    # In rows of 4096 tokens a layer's forward takes 0.62 MFLOPs a token (0.52 of it attention), the
    # head's 8.19: with the passes back 17.7 layers, more than the last of four ranks' share.
    heavy = plan_of(f"{PP}=4", f"{LAYERS}=auto", vocab_size=128_000)
    assert heavy.pipeline_layers == (10, 10, 11, 1)
    assert plan_of(f"{PP}=4", vocab_size=128_000) == ParallelPlan(pipeline=4)


def test_a_list_stands_as_it_is() -> None:
    assert plan_of(f"{PP}=4", f"{LAYERS}=[9,9,9,5]").pipeline_layers == (9, 9, 9, 5)
    assert plan_of(f"{PP}=4", f"{LAYERS}=[8,8,8,8]") == ParallelPlan(pipeline=4)
    chunks = plan_of(f"{PP}=2", f"{VPP}=2", f"{LAYERS}=[9,9,9,5]", ranks=2)
    assert [chunks.layers_of(p, 32).start for p in chunks.positions_of(1)] == [9, 27]


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (
            [f"{LAYERS}=[9,9,9,4]"],
            f"{LAYERS}: 9+9+9+4 is 31 layers, not num_hidden_layers=32 of actor.model; change the "
            "numbers, or set it to auto",
        ),
        (
            [f"{LAYERS}=[16,16]"],
            f"{LAYERS}: 2 numbers for pipeline times virtual pipeline size 4; give one for each "
            "position",
        ),
        (
            [f"{LAYERS}=[12,12,8,0]"],
            f"{LAYERS}: 0 layers at a position; give every position at least 1",
        ),
        (
            [f"{LAYERS}=auto", f"{VPP}=9"],
            "actor.parallel: pipeline times virtual pipeline size 36 is more than "
            "num_hidden_layers=32 of actor.model; choose at most 32",
        ),
    ],
)
def test_what_does_not_fit_is_said_with_its_cure(overrides: list[str], line: str) -> None:
    assert problems_of(job(f"{PP}=4", *overrides), 4) == [line]


def test_generation_divides_the_layers_of_its_model() -> None:
    shallow = job(f"{PP}=4", num_hidden_layers=6)
    assert generation_problems(Resolution(shallow, 4), "--model") == []
    uneven = job(f"{PP}=4", f"{LAYERS}=[8,8,8,8]", num_hidden_layers=6)
    (line,) = generation_problems(Resolution(uneven, 4), "--model")
    assert line.endswith("num_hidden_layers=6 of --model; change the numbers, or set it to auto")


def test_models_of_other_depths_share_a_pipeline() -> None:
    reference = json.dumps({**MODEL, "num_hidden_layers": 13})
    overrides = (f"{PP}=4", f"reference.model.config={reference}")
    made = job_plan(job(*overrides), ModelOptions(), 4)
    assert made.phase("train").order == "time_shared"
    assert plan_of(*overrides, role="reference").pipeline_layers == (3, 3, 4, 3)
    # A list for the actor's layers is none for another model's.
    (line,) = problems_of(job(*overrides, f"{LAYERS}=[8,8,8,8]"), 4)
    assert line.startswith(f"{LAYERS}: 8+8+8+8 is 32 layers, not num_hidden_layers=13 of reference")
    own = "reference.parallel={pipeline_model_parallel_size: 4}"
    assert problems_of(job(*overrides, f"{LAYERS}=[8,8,8,8]", own), 4) == []


def test_actor_and_critic_of_other_depths_share_a_pipeline() -> None:
    critic = json.dumps({**MODEL, "num_hidden_layers": 6})
    ppo = ("stage=ppo", "reward.function=a:b", "generation.max_new_tokens=8")
    made = job(f"{PP}=4", *ppo, f"critic.model.config={critic}")
    assert problems_of(made, 4) == []
    assert Resolution(made, 4).plan.models["critic"].plan.pipeline_layers == (1, 2, 2, 1)
    assert job_plan(made, ModelOptions(), 4).phase("learn").order == "time_shared"


def test_a_plan_and_a_model_of_different_roles_are_held_against_each_other() -> None:
    reward = json.dumps({**MODEL, "num_hidden_layers": 3})
    ppo = ("stage=ppo", "generation.max_new_tokens=8", f"reward.model.config={reward}")
    # The critic is the reward model's copy under the actor's plan; the reward model has its own.
    (line,) = problems_of(job(f"{PP}=4", *ppo, "reward.parallel={}"), 4)
    assert "size 4 is more than num_hidden_layers=3 of reward.model" in line
