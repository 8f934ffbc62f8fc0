"""Contexts, phases and plans of jobs: of shipped configs, and of models that are done on paper."""

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

from hypothesis import strategies as st

from puzzle_align.config.load import load_job
from puzzle_align.layout.job_plan import ContextPlan, JobPlan, Order, Phase, Workload, resolve_order
from puzzle_align.layout.model import ModelOptions, ModelSpec
from puzzle_align.layout.plan import ParallelPlan
from puzzle_align.planning.costs.flops import flop_costs
from puzzle_align.planning.prediction import PredictedRun
from puzzle_align.schedules.registry import SCHEDULES, schedule_problem
from tests.costs import uniform
from tests.jobs import job_plan
from tests.specs import PAPER

CONFIGS = Path(__file__).parents[2] / "configs"
OPTIONS = ModelOptions(dtype="bf16", attention="flex")  # of shipped configs' plans
PP, TP = "pipeline_model_parallel_size", "tensor_model_parallel_size"
ONE, TWO, FOUR = ParallelPlan(), ParallelPlan(pipeline=2), ParallelPlan(pipeline=2, data=2)
ROLES = ("actor", "critic", "reference", "reward")
T = TypeVar("T")


def with_all(kind: type[T], **values: st.SearchStrategy[Any]) -> st.SearchStrategy[T]:
    """Values of a dataclass, whose every field is drawn."""
    assert values.keys() == {field.name for field in fields(kind)}  # type: ignore[arg-type]
    return st.builds(kind, **values)


def _plans(num_chunks: int) -> st.SearchStrategy[ParallelPlan]:
    """Plans with so many chunks on each pipeline rank, and a schedule that runs them."""
    fitting = [name for name in SCHEDULES if not schedule_problem(name, num_chunks)]
    return with_all(
        ParallelPlan,
        pipeline=st.integers(1, 3),
        data=st.integers(1, 3),
        tensor=st.integers(1, 2),
        virtual_pipeline=st.just(num_chunks),
        sequence_parallel=st.booleans(),
        pipeline_layers=st.lists(st.integers(1, 9), max_size=4).map(tuple),
        schedule=st.sampled_from([None, *fitting]),
    )


any_plan = st.integers(1, 3).flatmap(_plans)  # whether or not the layers would fit


def shipped(name: str, world_size: int, *overrides: str) -> JobPlan:
    """The plan of a config of this repository, with overrides."""
    path = CONFIGS / f"{name}.yaml"
    return job_plan(load_job(path.read_text(), overrides), OPTIONS, world_size)


def context(
    role: str,
    plan: ParallelPlan,
    workload: Workload = "train",
    first: int = 0,
    model: ModelSpec = PAPER,
    ranks: Sequence[int] | None = None,
    **options: Any,
) -> ContextPlan:
    """On ``ranks``, in their order; without, on as many as the plan needs, from ``first`` on."""
    return ContextPlan(
        role=role,
        workload=workload,
        model=model,
        options=ModelOptions(**options),
        plan=plan,
        ranks=tuple(range(first, first + plan.world_size) if ranks is None else ranks),
    )


def fed(policy: ParallelPlan, reference: ParallelPlan, first: int = 0) -> list[ContextPlan]:
    """A training actor and the reference that feeds it, which is on ranks from ``first`` on."""
    return [context("reference", reference, "infer", first), context("actor", policy)]


def phase_of(*contexts: ContextPlan, name: str = "train", order: Order | None = None) -> Phase:
    """In the order that is said, else in that of models that share no time."""
    chosen = order or resolve_order(contexts, share=False)
    return Phase(name=name, order=chosen, contexts=contexts)


def plan_of(*phases: Phase, stage: str = "dpo") -> JobPlan:
    """A job of these phases, on the ranks that they name."""
    ranks = {rank for phase in phases for own in phase.contexts for rank in own.ranks}
    return JobPlan(stage=stage, world_size=max(ranks) + 1, phases=phases)


def flop_run(phase: Phase, row_tokens: int, num_microbatches: int) -> PredictedRun:
    """Every model has so many microbatches; costs are of its FLOPs and bytes."""
    costs = {
        own.role: flop_costs(
            own.model, own.plan, own.options, row_tokens=row_tokens, train=own.workload == "train"
        )
        for own in phase.contexts
    }
    counts = {own.role: lambda _: num_microbatches for own in phase.contexts}
    return PredictedRun(phase=phase, num_microbatches=counts, costs=costs, num_passes=2)


def uniform_run(
    contexts: Sequence[ContextPlan],
    order: Order = "sequential",
    counts: dict[str, int] | None = None,
    num_positions: int = 2,
    num_passes: int = 1,
) -> PredictedRun:
    """Two microbatches of every model where ``counts`` say no other; forwards of 1, backwards 2."""
    numbers = dict.fromkeys(ROLES, 2) | (counts or {})
    trained = {c.role for c in contexts if c.workload == "train"}
    return PredictedRun(
        phase=phase_of(*contexts, order=order),
        num_microbatches={role: lambda _, n=number: n for role, number in numbers.items()},
        costs={
            role: uniform(num_positions, 1.0, 2.0 if role in trained else None) for role in ROLES
        },
        num_passes=num_passes,
    )
