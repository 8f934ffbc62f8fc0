"""Placement of a job's models, and reasons that keep them from where they are asked to be."""

import pytest

from puzzle_align.config.load import load_job
from puzzle_align.config.resolution import Resolution
from puzzle_align.layout.plan import ParallelPlan
from tests.unit.test_check import PP, SOUND, TP, VPP, order, problems_with

OWN_PLAN = f"reference.parallel.{PP[15:]}=2"
APART = "no two models have the same ranks and the same plan"
CONCURRENT = ("placement.reference=concurrent", "reference.parallel={}")


@pytest.mark.parametrize(
    ("overrides", "placement"),
    [
        ("", "sequential"),
        (f"{PP}=2", "time_shared"),
        (f"{PP}=2 {VPP}=2", "time_shared"),
        (f"{PP}=2 {OWN_PLAN}", "time_shared"),
        (f"{PP}=2 placement.reference=sequential", "sequential"),
    ],
)
def test_auto_time_shares_a_pipeline_where_it_can(overrides, placement) -> None:
    assert order(load_job(SOUND, overrides.split()), 2) == placement


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        (f"{PP}=1", "reference (P1, D4, T1): one pipeline rank leaves no bubbles"),
        (f"{PP}=2 reference.parallel={{}}", f"{APART}: reference (P1, D4, T1), actor (P2, D2, T1)"),
        (f"{PP}=2 {OWN_PLAN[:-1]}4", f"{APART}: reference (P4, D1, T1), actor (P2, D2, T1)"),
        (f"{PP}=2 dpo.loss_type=orpo", "the loss of stage dpo uses no reference"),
        (f"{PP}=2 dpo.precompute_ref_log_probs=true", "dpo.precompute_ref_log_probs=true runs"),
        (f"{PP}=2 dpo.loss_type=[aot,sft]", "a loss that sorts (aot, aot_unpaired) needs the"),
    ],
)
def test_what_keeps_the_reference_out_of_the_bubbles(overrides, why) -> None:
    assert order(load_job(SOUND, overrides.split()), 4) == "sequential"
    (line,) = problems_with("placement.reference=time_shared", *overrides.split(), ranks=4)
    assert line.startswith(f"placement.reference: time_shared, but {why}")
    assert line.endswith("; change that, or set it to auto")


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        ("", "reference.parallel=null does not say how many ranks it gets"),
        ("reference.parallel={} dpo.loss_type=simpo", "the loss of stage dpo uses no reference"),
        (
            "reference.parallel={} dpo.precompute_ref_log_probs=true",
            "dpo.precompute_ref_log_probs=true runs the reference before training",
        ),
        (
            "reference.parallel={} dpo.loss_type=aot",
            "a loss that sorts (aot, aot_unpaired) needs the whole batch's reference first",
        ),
    ],
)
def test_what_keeps_the_reference_from_ranks_of_its_own(overrides, why) -> None:
    (line,) = problems_with("placement.reference=concurrent", *overrides.split(), ranks=2)
    assert line == f"placement.reference: concurrent, but {why}; change that, or set it to auto"


@pytest.mark.parametrize(
    ("overrides", "ranks", "problem"),
    [
        (
            "",
            1,
            "P·T = 1 does not divide 0 ranks (1, less the reference's 1): start a multiple of 1 and"
            " 1 more, or change the sizes",
        ),
        (
            f"{PP}=2 reference.parallel.data_parallel_size=3",
            2,
            "P·T = 2 does not divide 0 ranks (2, less the reference's 3): start a multiple of 2 and"
            " 3 more, or change the sizes",
        ),
        (
            f"{PP}=2 actor.parallel.data_parallel_size=2",
            4,
            "P·D·T = 4 does not make 3 ranks (4, less the reference's 1): start 5, or change the"
            " sizes",
        ),
    ],
)
def test_too_few_ranks_for_two_models_side_by_side(overrides, ranks, problem) -> None:
    overrides = [*CONCURRENT, "actor.parallel={}", *overrides.split()]
    assert problems_with(*overrides, ranks=ranks) == [f"actor.parallel: {problem}"]


def test_a_concurrent_reference_has_the_last_ranks_and_the_actor_the_others() -> None:
    overrides = [*CONCURRENT, OWN_PLAN, f"{TP}=2"]
    job = load_job(SOUND, overrides)
    assert problems_with(*overrides, ranks=8) == []
    assert Resolution(job).smallest_world_size() == 4
    assert order(job, 8) == "concurrent"
    assert Resolution(job, 8).ranks("actor") == range(6)
    assert Resolution(job, 8).ranks("reference") == range(6, 8)
    assert Resolution(job, 8).plan.models["actor"].plan == ParallelPlan(data=3, tensor=2)
    assert Resolution(job, 8).plan.models["reference"].plan == ParallelPlan(pipeline=2)


def test_the_data_parallel_size_fills_the_world() -> None:
    job = load_job(SOUND, [f"{TP}=2", f"{PP}=2", f"{VPP}=2"])
    plan = Resolution(job, 8).grid("reference")
    assert plan == ParallelPlan(pipeline=2, data=2, tensor=2, virtual_pipeline=2)


@pytest.mark.parametrize(
    ("overrides", "size"),
    [
        ("", 1),
        (f"{TP}=2 {PP}=2", 4),
        (f"actor.parallel.data_parallel_size=3 {PP}=2", 6),
        (f"{PP}=2 reference.parallel.tensor_model_parallel_size=3", 6),
        (f"{PP}=2 reference.parallel.tensor_model_parallel_size=3 dpo.loss_type=orpo", 2),
    ],
)
def test_smallest_world_size(overrides, size) -> None:
    assert Resolution(load_job(SOUND, overrides.split())).smallest_world_size() == size
