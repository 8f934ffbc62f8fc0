"""Who is where in a job: every stage's contexts, their ranks and turns, and the plan as JSON."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from puzzle_align.config.load import load_file, load_job
from puzzle_align.config.placement import job_plan, phase_obstacle, time_sharing_obstacle
from puzzle_align.layout.job_plan import (
    ContextPlan,
    JobPlan,
    Order,
    Phase,
    Workload,
    resolve_order,
    sets_of_ranks,
)
from puzzle_align.layout.model import ModelOptions, ModelSpec
from puzzle_align.layout.plan import ParallelPlan

CONFIGS = Path(__file__).parents[2] / "configs"
OPTIONS = ModelOptions(dtype="bf16", attention="flex")
MODEL = ModelSpec(
    model_type="llama",
    hidden_size=8,
    intermediate_size=16,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=2,
    vocab_size=128,
    max_position_embeddings=64,
)
PP, TP = "pipeline_model_parallel_size", "tensor_model_parallel_size"
FOUR = ParallelPlan(pipeline=2, data=2)


def shipped(name: str, world_size: int, *overrides: str) -> JobPlan:
    path = CONFIGS / f"{name}.yaml"
    return job_plan(load_job(path.read_text(), overrides), OPTIONS, world_size)


def outline(phase: Phase) -> tuple[str, Order, list[tuple[str, Workload]]]:
    return phase.name, phase.order, [(own.role, own.workload) for own in phase.contexts]


def context(
    role: str, plan: ParallelPlan, ranks: Sequence[int], workload: Workload = "train"
) -> ContextPlan:
    return ContextPlan(
        role=role, workload=workload, model=MODEL, options=OPTIONS, plan=plan, ranks=tuple(ranks)
    )


def phase_of(*contexts: ContextPlan, order: Order = "sequential") -> Phase:
    return Phase(name="train", order=order, contexts=contexts)


# Stage dpo.
BOTH: list[tuple[str, Workload]] = [("reference", "infer"), ("actor", "train")]


@pytest.mark.parametrize(
    ("overrides", "ranks", "order"),
    [
        ([], 2, "sequential"),
        ([f"actor.parallel.{PP}=2"], 4, "time_shared"),
        ([f"actor.parallel.{PP}=2", "placement.reference=sequential"], 4, "sequential"),
        ([f"actor.parallel.{PP}=2", f"reference.parallel.{TP}=2"], 4, "sequential"),
        (["placement.reference=concurrent", "reference.parallel={}"], 3, "concurrent"),
    ],
)
def test_dpo_trains_beside_its_reference(overrides: list[str], ranks: int, order: Order) -> None:
    plan = shipped("dpo_tiny", ranks, *overrides)
    assert (plan.stage, plan.world_size) == ("dpo", ranks)
    assert [outline(phase) for phase in plan.phases] == [("train", order, BOTH)]
    phase = plan.phase("train")
    assert phase.is_fed and not phase.once
    assert phase.roles == ("reference", "actor")
    assert [own.role for own in phase.trained] == ["actor"]
    assert list(plan.models) == list(plan.residents) == ["actor", "reference"]
    assert list(plan.trained) == ["actor"]
    actor, reference = phase.context("actor"), phase.context("reference")
    assert plan.contexts == (actor, reference)
    assert (actor.model, actor.options) == (reference.model, reference.options)
    assert actor.is_colocated(reference) == (actor.plan == reference.plan and order != "concurrent")


def test_a_concurrent_reference_has_the_last_ranks() -> None:
    overrides = ["placement.reference=concurrent", f"reference.parallel.{PP}=2"]
    plan = shipped("dpo_tiny", 6, *overrides, f"actor.parallel.{TP}=2")
    actor, reference = plan.context("actor", "train"), plan.context("reference", "infer")
    assert (actor.plan, actor.ranks) == (ParallelPlan(data=2, tensor=2), (0, 1, 2, 3))
    assert (reference.plan, reference.ranks) == (ParallelPlan(pipeline=2), (4, 5))
    assert plan.phase("train").held(3) == [actor]
    assert plan.phase("train").held(4) == [reference]
    assert plan.phase("train").lane_names == ("rank 0", "rank 4", "rank 5")


@pytest.mark.parametrize("override", ["dpo.loss_type=simpo", "dpo.reference_free=true"])
def test_dpo_without_a_reference_has_the_actor_alone(override: str) -> None:
    plan = shipped("dpo_tiny", 4, override, f"actor.parallel.{PP}=2")
    assert [outline(phase) for phase in plan.phases] == [
        ("train", "sequential", [("actor", "train")])
    ]
    assert not plan.phase("train").is_fed
    assert list(plan.models) == ["actor"]


def test_a_reference_that_runs_before_training_is_let_go_of() -> None:
    overrides = ["dpo.precompute_ref_log_probs=true", f"actor.parallel.{PP}=2"]
    plan = shipped("dpo_tiny", 4, *overrides)
    assert [(*outline(phase), phase.once) for phase in plan.phases] == [
        ("precompute", "sequential", [("reference", "infer")], True),
        ("train", "sequential", [("actor", "train")], False),
    ]
    assert list(plan.models) == ["actor", "reference"]
    assert list(plan.residents) == ["actor"]
    assert not any(phase.is_fed for phase in plan.phases)
    assert plan.context("reference", "infer").plan == ParallelPlan(pipeline=2, data=2)


@pytest.mark.parametrize(
    ("name", "ranks", "expected"),
    [
        ("dpo_tiny", 2, ParallelPlan(data=2)),
        ("dpo_7b", 8, ParallelPlan(data=4, tensor=2, sequence_parallel=True)),
        ("dpo_70b", 64, ParallelPlan(pipeline=4, data=2, tensor=8, sequence_parallel=True)),
        ("reward_tiny", 1, ParallelPlan()),
        ("reward_7b", 16, ParallelPlan(data=8, tensor=2, sequence_parallel=True)),
        ("ppo_tiny", 2, ParallelPlan(data=2)),
        ("ppo_7b", 8, ParallelPlan(pipeline=2, data=2, tensor=2, sequence_parallel=True)),
        ("ppo_33b_7b", 32, ParallelPlan(pipeline=4, data=2, tensor=4, sequence_parallel=True)),
    ],
)
def test_models_of_a_shipped_config_are_all_on_all_ranks(
    name: str, ranks: int, expected: ParallelPlan
) -> None:
    plan = shipped(name, ranks)
    assert plan == job_plan(load_file(CONFIGS / f"{name}.yaml"), OPTIONS, ranks)
    for own in plan.contexts:
        assert (own.plan, own.ranks) == (expected, tuple(range(ranks)))
        recompute = "none" if name.endswith("tiny") else "selective"
        assert own.options == replace(OPTIONS, recompute=recompute)
    for phase in plan.phases:
        several = len(phase.contexts) > 1 and expected.pipeline > 1
        assert phase.order == ("time_shared" if several else "sequential")
        assert phase.lane_names == tuple(f"P{rank}" for rank in range(expected.pipeline))
        (group,) = phase.colocated
        assert phase.shares_time(group) == several


def test_a_reward_model_is_trained_alone() -> None:
    plan = shipped("reward_7b", 4)
    assert [outline(phase) for phase in plan.phases] == [
        ("train", "sequential", [("reward", "train")])
    ]
    assert list(plan.trained) == list(plan.residents) == ["reward"]
    assert plan.context("reward", "train").model.head == "scalar"
    assert not plan.phase("train").is_fed


# Stage ppo.
GENERATE = ("generate", "sequential", [("actor", "generate")])
SCORED = ("actor", "reference", "reward", "critic")
LEARNT = [("actor", "train"), ("critic", "train")]


def scored(*roles: str) -> list[tuple[str, Workload]]:
    return [(role, "infer") for role in roles]


@pytest.mark.parametrize("placement", ["time_shared", "sequential"])
def test_ppo_has_three_phases(placement: Order) -> None:
    both = [f"placement.{name}={placement}" for name in ("score", "learn")]
    plan = shipped("ppo_33b_7b", 32, *(both if placement == "sequential" else []))
    assert [outline(phase) for phase in plan.phases] == [
        GENERATE,
        ("score", placement, scored(*SCORED)),
        ("learn", placement, LEARNT),
    ]
    assert not any(phase.is_fed or phase.once for phase in plan.phases)
    assert [(own.role, own.workload) for own in plan.contexts] == [
        *LEARNT,
        ("actor", "generate"),
        *scored(*SCORED),
    ]
    assert list(plan.trained) == ["actor", "critic"]
    assert list(plan.models) == list(plan.residents) == ["actor", "critic", "reference", "reward"]
    workloads = {role: own.workload for role, own in plan.models.items()}
    assert workloads == {
        "actor": "train",
        "critic": "train",
        "reference": "infer",
        "reward": "infer",
    }
    for own in plan.contexts:
        assert own.model == plan.models[own.role].model
        assert own.model.head == ("lm" if own.role in ("actor", "reference") else "scalar")
    assert plan.models["reward"].model.hidden_size == 4096
    assert plan.models["reference"].model.hidden_size == 6656


def test_ppo_scores_with_the_models_that_it_has() -> None:
    plan = shipped("ppo_tiny", 2)  # a reward function in place of a model
    assert outline(plan.phase("score")) == ("score", "sequential", scored("reference", "critic"))
    alone = shipped("ppo_tiny", 2, "ppo.kl_coef=0")
    assert outline(alone.phase("score")) == ("score", "sequential", scored("critic"))
    assert list(alone.models) == ["actor", "critic"]


def test_ppo_with_models_on_ranks_apart() -> None:
    places = ["actor.ranks=0-3", f"actor.parallel.{PP}=2", "critic.ranks=4-5"]
    plan = shipped("ppo_tiny", 6, *places, f"critic.parallel.{TP}=2")
    assert plan.context("actor", "generate").plan == ParallelPlan(pipeline=2, data=2)
    assert plan.context("reference", "infer").ranks == (0, 1, 2, 3)
    for workload in ("infer", "train"):
        critic = plan.context("critic", workload)
        assert (critic.plan, critic.ranks) == (ParallelPlan(tensor=2), (4, 5))
    assert [phase.order for phase in plan.phases] == ["sequential", "concurrent", "concurrent"]
    learn = plan.phase("learn")
    assert learn.lanes == (0, 2, 4)
    assert learn.lane_names == ("rank 0", "rank 2", "rank 4")
    assert [len(group) for group in learn.colocated] == [1, 1]
    assert plan.phase("generate").lane_names == ("P0", "P1")


def test_ppo_with_two_that_share_and_a_third_elsewhere() -> None:
    """Hybrid: reference and critic in one pipeline, the reward model on ranks of its own."""
    places = [f"actor.parallel.{PP}=2", "actor.ranks=0-3", "critic.ranks=0-3", "reward.ranks=4-5"]
    model = json.dumps(load_file(CONFIGS / "ppo_tiny.yaml").actor.model.config)
    plan = shipped("ppo_tiny", 6, *places, f"reward.model.config={model}")
    score = plan.phase("score")
    assert outline(score) == ("score", "time_shared", scored("reference", "reward", "critic"))
    groups = [[own.role for own in group] for group in score.colocated]
    assert groups == [["reference", "critic"], ["reward"]]
    assert list(map(score.shares_time, score.colocated)) == [True, False]
    assert plan.phase("learn").order == "time_shared"
    assert plan.context("reward", "infer").plan == ParallelPlan(pipeline=2)  # the actor's
    one_by_one = shipped(
        "ppo_tiny", 6, *places, f"reward.model.config={model}", "placement.score=sequential"
    )
    assert one_by_one.phase("score").order == "sequential"
    assert not any(map(one_by_one.phase("score").shares_time, score.colocated))


def test_recompute_is_each_roles_own() -> None:
    own = ["critic.parallel.recompute=full", "actor.parallel.recompute=selective"]
    plan = shipped("ppo_tiny", 2, *own)
    found = {c.role: c.options.recompute for c in plan.contexts}
    assert found == {"actor": "selective", "critic": "full", "reference": "selective"}


@pytest.mark.parametrize("pipeline", [1, 2])
@pytest.mark.parametrize("own", ["", "PP1", "PP2", "PP2TP2", "VPP2", "D2", "recompute"])
@pytest.mark.parametrize("name", ["dpo_tiny", "ppo_tiny"])
def test_models_share_time_unless_something_keeps_them_from_it(
    name: str, own: str, pipeline: int
) -> None:
    """What errors call an obstacle is what makes the order another one."""
    sizes = {
        "": [],
        "PP1": [f"{PP}=1"],
        "PP2": [f"{PP}=2"],
        "PP2TP2": [f"{PP}=2", f"{TP}=2"],
        "VPP2": [f"{PP}=2", "virtual_pipeline_model_parallel_size=2"],
        "D2": [f"{PP}=2", "data_parallel_size=2"],
        "recompute": [f"{PP}=2", "recompute=full"],
    }
    other = "reference" if name == "dpo_tiny" else "critic"
    overrides = [f"actor.parallel.{PP}={pipeline}"]
    overrides += [f"{other}.parallel.{size}" for size in sizes[own]]
    job = load_job((CONFIGS / f"{name}.yaml").read_text(), overrides)
    plan = job_plan(job, OPTIONS, 4)
    if name == "dpo_tiny":
        phase, obstacle = plan.phase("train"), time_sharing_obstacle(job)
    else:
        phase, obstacle = plan.phase("learn"), phase_obstacle(job, "learn", 4)
    assert (phase.order == "time_shared") == (obstacle is None)


@pytest.mark.parametrize("name", ["dpo_tiny", "ppo_tiny"])
def test_a_plan_that_does_not_fit_the_ranks_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"^actor\.parallel: P=2 x D=null x T=1 does not make 3"):
        shipped(name, 3, f"actor.parallel.{PP}=2")


# Parts, lanes and turns.
def test_parts_of_ranks_in_any_order() -> None:
    own = context("actor", FOUR, (7, 2, 5, 0))
    assert own.parts == (7, 5)
    assert [own.part(rank) for rank in (7, 2, 5, 0)] == [0, 0, 1, 1]
    assert own.part(1) is None
    assert [own.output_rank(data_rank) for data_rank in range(2)] == [5, 0]
    tensor = context("actor", ParallelPlan(pipeline=2, tensor=2, data=2), (3, 2, 1, 0, 9, 8, 7, 6))
    assert tensor.parts == (3, 9)
    assert [tensor.output_rank(data_rank) for data_rank in range(2)] == [9, 7]
    assert tensor.topology.coordinates(7) == (1, 1, 0)
    with pytest.raises(ValueError, match="needs 4 distinct ranks"):
        _ = context("actor", FOUR, (0, 1, 2)).topology


def test_contexts_are_colocated_under_one_plan_on_the_same_ranks() -> None:
    own = context("actor", FOUR, range(4))
    assert own.is_colocated(context("critic", FOUR, range(4), "infer"))
    assert not own.is_colocated(context("critic", FOUR, (1, 0, 2, 3)))
    assert not own.is_colocated(context("critic", FOUR, range(1, 5)))
    assert not own.is_colocated(context("critic", replace(FOUR, sequence_parallel=True), range(4)))


def test_a_lane_is_named_for_the_trained_models_pipeline_rank() -> None:
    actor = context("actor", FOUR, range(4))
    assert phase_of(actor).lanes == (0, 2)
    whole = context("reference", ParallelPlan(data=4), range(4), "infer")
    assert phase_of(whole, actor).lane_names == ("P0", "P1")
    assert phase_of(replace(whole, workload="train"), actor).lane_names == ("rank 0", "rank 2")
    frozen = replace(actor, workload="infer")
    assert phase_of(frozen, whole).lane_names == ("rank 0", "rank 2")
    assert phase_of(frozen).lane_names == ("P0", "P1")
    later = context("critic", FOUR, range(4, 8))
    assert phase_of(later).lane_names == ("P0", "P1")
    assert phase_of(actor, later).lane_names == tuple(f"rank {rank}" for rank in (0, 2, 4, 6))


def test_a_lane_is_its_smallest_rank() -> None:
    turned = context("actor", FOUR, (3, 1, 2, 0))
    assert sets_of_ranks([turned]) == [(0, 2), (1, 3)]
    assert phase_of(turned).lanes == (0, 1)
    assert phase_of(turned).lane_names == ("rank 0", "rank 1")


@pytest.mark.parametrize(
    ("contexts", "sets"),
    [
        ([context("a", FOUR, range(4))], [(0, 1), (2, 3)]),
        (
            [context("a", ParallelPlan(data=4), range(4)), context("b", FOUR, range(4))],
            [(0, 1), (2, 3)],
        ),
        (
            [
                context("a", ParallelPlan(data=4), range(4)),
                context("b", ParallelPlan(data=2), range(2)),
            ],
            [(0, 1), (2, 3)],
        ),
        (
            [context("a", ParallelPlan(), (0,)), context("b", ParallelPlan(), (3,))],
            [(0,), (3,)],
        ),
        (
            [
                context("a", ParallelPlan(tensor=4), range(4)),
                context("b", ParallelPlan(pipeline=4), range(4)),
            ],
            [(0,), (1,), (2,), (3,)],
        ),
        (
            [
                context("a", ParallelPlan(data=4), range(4)),
                context("b", ParallelPlan(data=2), (2, 1)),
            ],
            [(0, 3), (1, 2)],
        ),
    ],
)
def test_ranks_that_hold_the_same_are_one_set(
    contexts: list[ContextPlan], sets: list[tuple[int, ...]]
) -> None:
    assert sets_of_ranks(contexts) == sets
    assert phase_of(*contexts).lanes == tuple(own[0] for own in sets)


plans = st.builds(
    ParallelPlan,
    pipeline=st.integers(1, 3),
    data=st.integers(1, 3),
    tensor=st.integers(1, 2),
    virtual_pipeline=st.integers(1, 3),
    sequence_parallel=st.booleans(),
)


@st.composite
def placed(draw: st.DrawFn, role: str = "actor") -> ContextPlan:
    plan = draw(plans)
    world = draw(st.permutations(range(plan.world_size + 4)))
    return context(role, plan, world[: plan.world_size], draw(st.sampled_from(get_args(Workload))))


@given(placed())
def test_parts_are_the_topologys(own: ContextPlan) -> None:
    for rank in own.ranks:
        pipeline, data, tensor = own.topology.coordinates(rank)
        assert own.part(rank) == pipeline
        assert (rank == own.parts[pipeline]) == (data == tensor == 0)
        is_output = (pipeline, tensor) == (own.plan.pipeline - 1, 0)
        assert (rank == own.output_rank(data)) == is_output
    outside = set(range(max(own.ranks) + 2)) - set(own.ranks)
    assert {own.part(rank) for rank in outside} == {None}


@given(
    st.lists(st.sampled_from("abcd"), unique=True, min_size=1).flatmap(
        lambda roles: st.tuples(*(placed(role) for role in roles))
    )
)
def test_sets_partition_the_ranks_by_what_they_hold(contexts: tuple[ContextPlan, ...]) -> None:
    sets = sets_of_ranks(contexts)
    everyone = [rank for ranks in sets for rank in ranks]
    assert sorted(everyone) == sorted({rank for own in contexts for rank in own.ranks})
    held = [{tuple(own.part(rank) for own in contexts) for rank in ranks} for ranks in sets]
    assert all(len(parts) == 1 for parts in held)
    assert len(set.union(*held)) == len(sets)
    assert list(phase_of(*contexts).lanes) == sorted(min(ranks) for ranks in sets)


@given(
    st.lists(
        st.tuples(st.sampled_from([FOUR, ParallelPlan(data=2)]), st.sampled_from([0, 2, 4])),
        max_size=4,
    ),
    st.booleans(),
)
def test_turns_follow_from_ranks_and_plans(
    places: list[tuple[ParallelPlan, int]], share: bool
) -> None:
    contexts = [
        context(f"model {number}", plan, range(first, first + plan.world_size))
        for number, (plan, first) in enumerate(places)
    ]
    order = resolve_order(contexts, share=share)
    phase = phase_of(*contexts, order=order)
    # In order, everyone once, those together that are colocated.
    assert sorted(own.role for group in phase.colocated for own in group) == [
        own.role for own in contexts
    ]
    assert len(phase.colocated) == len(set(places))
    for group in phase.colocated:
        assert all(own.is_colocated(group[0]) for own in group)
        assert [own.role for own in group] == sorted(own.role for own in group)
    fills = any(places.count(place) > 1 and place[0].pipeline > 1 for place in places)
    ranks = [rank for own in contexts for rank in own.ranks]
    apart = len(contexts) > 1 and len(set(ranks)) == len(ranks)
    if share and fills:
        assert order == "time_shared"
    else:
        assert order == ("concurrent" if apart else "sequential")
    assert any(map(phase.shares_time, phase.colocated)) == (order == "time_shared")
