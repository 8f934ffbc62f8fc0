"""Who is where in a job: every stage's contexts, their ranks and turns, and the plan as JSON."""

import json
from dataclasses import replace

import pytest

from puzzle_align.config.load import load_file
from puzzle_align.layout.job_plan import Order, Phase, Workload
from puzzle_align.layout.plan import ParallelPlan
from tests.unit.job_plans import CONFIGS, OPTIONS, PP, TP, shipped


def outline(phase: Phase) -> tuple[str, Order, list[tuple[str, Workload]]]:
    return (
        phase.name,
        phase.order,
        [(context_plan.role, context_plan.workload) for context_plan in phase.contexts],
    )


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
    assert [context_plan.role for context_plan in phase.trained] == ["actor"]
    assert list(plan.models) == list(plan.residents) == ["actor", "reference"]
    assert list(plan.trained) == ["actor"]
    actor, reference = phase.context("actor"), phase.context("reference")
    assert plan.contexts == (actor, reference)
    assert (actor.model, actor.options) == (reference.model, reference.options)
    assert actor.is_colocated(reference) == (actor.plan == reference.plan and order != "concurrent")


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
def test_shipped_models_are_all_on_all_ranks(name: str, ranks: int, expected: ParallelPlan) -> None:
    plan = shipped(name, ranks)
    assert plan.switches == (name == "ppo_7b")
    if name == "ppo_7b":  # which samples with a copy on every rank, in the order that moves least
        generate, *others = plan.phases
        (sampling,) = generate.contexts
        assert sampling.plan == ParallelPlan(data=8) and sorted(sampling.ranks) == [*range(ranks)]
        plan = replace(plan, phases=tuple(others))
    for context_plan in plan.contexts:
        assert (context_plan.plan, context_plan.ranks) == (expected, tuple(range(ranks)))
        assert context_plan.options == OPTIONS
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
    assert [(context_plan.role, context_plan.workload) for context_plan in plan.contexts] == [
        *LEARNT,
        ("actor", "generate"),
        *scored(*SCORED),
    ]
    assert list(plan.trained) == ["actor", "critic"]
    assert list(plan.models) == list(plan.residents) == ["actor", "critic", "reference", "reward"]
    workloads = {role: context_plan.workload for role, context_plan in plan.models.items()}
    assert workloads == {
        "actor": "train",
        "critic": "train",
        "reference": "infer",
        "reward": "infer",
    }
    for context_plan in plan.contexts:
        assert context_plan.model == plan.models[context_plan.role].model
        assert context_plan.model.head == (
            "lm" if context_plan.role in ("actor", "reference") else "scalar"
        )
    assert plan.models["reward"].model.hidden_size == 4096
    assert plan.models["reference"].model.hidden_size == 6656


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
    groups = [[context_plan.role for context_plan in group] for group in score.colocated]
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
    keys = ["critic.parallel.recompute=full", "actor.parallel.recompute=selective"]
    plan = shipped("ppo_tiny", 2, *keys)
    found = {c.role: c.options.recompute for c in plan.contexts}
    assert found == {"actor": "selective", "critic": "full", "reference": "selective"}
