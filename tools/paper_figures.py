"""A configuration of PUZZLE planned on paper: its plan, what time-sharing and the switch bring."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from paper_cases import CLUSTERS, Configuration, load_of, space_of
from paper_singles import Least, Narrowed, Singles, grid_of, samples_with, sizes_of
from reshard_cases import TABLE_3, Case
from timeshare_schedules import CRITIC, POLICY, two_trainings_bound

from puzzle_align.layout.job_plan import ContextPlan, Phase
from puzzle_align.planning.evaluation import Planned, evaluate
from puzzle_align.planning.iteration import phase_run
from puzzle_align.planning.prediction import PredictedRun
from puzzle_align.planning.report import plan_text
from puzzle_align.planning.search import exhaustive
from puzzle_align.planning.space import Choice, Space
from puzzle_align.planning.times import Times
from puzzle_align.schedules.costs import uniform

Figures = dict[str, Any]
SHARES = (1, 2, 4)  # of Table 2's batch, that time-sharing is looked at with: whole, half, quarter
LEAST_PIPELINE = 4
FAMILIES = ("all", "no_replicas", "as_the_paper")


def case_of(
    configuration: Configuration, cluster: str, row_sizes: Sequence[int], *, sharded: bool
) -> Figures:
    """All figures of a configuration on a cluster; sharded, too, where nothing fits otherwise."""
    space, times = space_of(configuration, CLUSTERS[cluster], row_sizes, sharded=sharded)
    choices = list(space.choices())
    found = exhaustive(Narrowed(space, choices, lambda _: True), times, 1)
    if not found.best:
        if sharded:
            raise ValueError(f"{configuration.name} on {cluster}: no plan fits")
        return case_of(configuration, cluster, row_sizes, sharded=True)
    (best,) = found.best
    learn = list(time_shared(configuration, space, times, choices))
    deep = [one for one in learn if one["microbatches"] >= one["plan"][0]]
    return {
        "configuration": configuration.name,
        "cluster": cluster,
        "ranks": configuration.ranks,
        "batch": configuration.batch,
        "distributed_optimizer": sharded,
        "num_plans": found.num_plans,
        "chosen": plan_figures(best),
        "time_sharing": {
            "of_chosen": sharing_figures(times, best.plan.phase("learn"), best.settings.row_tokens),
            "most": max(learn, key=_speedup, default=None),
            "most_with_a_microbatch_a_rank": max(deep, key=_speedup, default=None),
            "plans": learn,
        },
        "switch": {
            "all": switch_figures(space, times, choices, best),
            "no_replicas": without_replicas(space, times, choices),
            "as_the_paper": as_the_paper(configuration, cluster, space, times, choices),
        },
    }


def plan_figures(planned: Planned) -> Figures:
    """What is predicted of a plan."""
    return {
        "plan": plan_text(planned),
        "trains": grid_of(planned),
        "samples": samples_with(planned),
        "seconds": planned.seconds,
        "phases": {name: phase.seconds for name, phase in planned.phases.items()},
        "idle": {name: phase.idle for name, phase in planned.phases.items() if phase.idle},
        "peak_gb": planned.peak_bytes / 1e9,
    }


def sharing_figures(times: Times, learn: Phase, row_tokens: int) -> Figures | None:
    """The learn phase time-shared over sequential; None: its models are on ranks of their own.

    ``speedup`` is of the phase, ``of_passes`` without rows' preparation, sums and optimizers.
    """
    if learn.order == "concurrent":
        return None
    shared, sequential = replace(learn, order="time_shared"), replace(learn, order="sequential")
    seconds = times.phase(shared, row_tokens).seconds, times.phase(sequential, row_tokens).seconds
    settings = replace(times.settings, row_tokens=row_tokens)
    own = phase_run(shared, times.measured, times.load, settings)
    number = round(max(own.counts.values()))
    return {
        "row_tokens": row_tokens,
        "microbatches": number,
        "seconds": seconds[0],
        "sequential_seconds": seconds[1],
        "speedup": seconds[1] / seconds[0],
        "of_passes": (seconds[1] - own.beside) / (seconds[0] - own.beside),
        "equation_1": equation_1(own.run, number),
    }


def equation_1(run: PredictedRun, num_microbatches: int) -> float | None:
    """The paper's theoretical speed-up at the ranks' mean costs; None with chunks: not its case."""
    actor, critic = (run.phase.context(role) for role in (POLICY, CRITIC))
    if actor.plan.virtual_pipeline > 1:
        return None
    number = actor.plan.pipeline
    costs = {
        context.role: uniform(
            1,
            sum(run.costs[context.role].forward) / number,
            sum(run.costs[context.role].backward) / number,
        )
        for context in (actor, critic)
    }
    return two_trainings_bound(number, num_microbatches, costs)


def time_shared(
    configuration: Configuration, space: Space, times: Times, choices: Iterable[Choice]
) -> Iterator[Figures]:
    """As Figure 10: the learn phase of plain pipelines that fit, by plan and batch."""
    plain = [
        choice
        for choice in choices
        if choice.mode == "colocated" and _is_plain(choice.context("actor"))
    ]
    seen = set()
    for share in SHARES:
        batch = configuration.batch // share
        own = Times(times.measured, load_of(batch), times.settings)
        for choice in plain:
            plan = choice.context("actor").plan
            rows = own.load.rows(choice.row_tokens, 1, plan.data, 1)
            key = sizes_of(plan), rows.microbatches  # rows half as long of half the batch: alike
            if key in seen or batch < plan.data or not _fits(space, own, choice):
                continue
            seen.add(key)
            (learn,) = (phase for phase in choice.phases if phase.name == "learn")
            figures = sharing_figures(own, learn, choice.row_tokens)
            assert figures is not None
            yield {"plan": sizes_of(plan), "batch": batch, **figures}


def _is_plain(context: ContextPlan) -> bool:
    plan = context.plan
    deep = plan.pipeline >= LEAST_PIPELINE
    return deep and plan.virtual_pipeline == 1 and context.options.recompute == "none"


def _fits(space: Space, times: Times, choice: Choice) -> bool:
    """Whether a choice does where nothing is sampled."""
    least = evaluate(space, Least.like(times), choice, None)
    return least.peak_bytes <= space.cluster.memory_bytes


def switch_figures(
    space: Space, times: Times, choices: Sequence[Choice], best: Planned | None
) -> Figures | None:
    """The fastest plan beside the single ones of the same choices."""
    if best is None:
        return None
    singles = Singles(space, times, choices)
    return against(
        best,
        generation_optimal=singles.generation_optimal(),
        training_optimal=singles.training_optimal(),
        fastest_single=singles.fastest(),
    )


def against(best: Planned, **singles: Planned | None) -> Figures:
    """A plan, single ones, and how much faster it is than they are."""
    there = {name: single for name, single in singles.items() if single is not None}
    return {
        "best": plan_figures(best),
        **{name: plan_figures(single) for name, single in there.items()},
        "speedup": {name: single.seconds / best.seconds for name, single in there.items()},
    }


def without_replicas(space: Space, times: Times, choices: Iterable[Choice]) -> Figures | None:
    """Of plans of one data rank, as all that the paper names are."""
    some = [
        choice
        for choice in choices
        if all(c.plan.data == 1 for phase in choice.phases for c in phase.contexts)
    ]
    narrowed = Narrowed(space, some, lambda plan: plan.data == 1)
    found = exhaustive(narrowed, times, 1).best
    return switch_figures(space, times, some, found[0] if found else None)


def as_the_paper(
    configuration: Configuration, cluster: str, space: Space, times: Times, choices: list[Choice]
) -> Figures | None:
    """Training in one pipeline of all ranks, no chunks, and a switch to fewer ranks of it.

    Where Table 3 has the configuration, it goes to that plan, else to the fastest. The single
    plans are the two that it goes between.
    """
    whole = configuration.ranks, 1, 1
    table_3 = _of_table_3(configuration, cluster)
    some = [
        choice
        for choice in choices
        if choice.mode == "colocated" and choice.context("actor").plan.virtual_pipeline == 1
    ]
    pipelines = [one for one in some if sizes_of(one.context("actor").plan) == whole]
    narrowed = Narrowed(
        space,
        pipelines,
        lambda plan: (
            plan.data == 1 < plan.tensor
            and (table_3 is None or sizes_of(plan) == sizes_of(table_3.after))
        ),
    )
    found = exhaustive(narrowed, times, 1).best
    if not found:
        return None
    (best,) = found
    singles = Singles(space, times, some)
    figures = against(
        best,
        generation_optimal=singles.fastest(sizes=samples_with(best)),
        training_optimal=singles.fastest(sizes=whole),
    )
    figures["switch_seconds"] = best.phases["switch"].seconds
    figures["table_3_seconds"] = table_3.paper_seconds if table_3 else None
    figures["plans_stated"] = table_3.stated if table_3 else False
    return figures


def _of_table_3(configuration: Configuration, cluster: str) -> Case | None:
    name = f"{configuration.name} {cluster}"
    return next((case for case in TABLE_3 if case.name == name), None)


def _speedup(figures: Figures) -> float:
    return figures["speedup"]


def means_of(cases: Sequence[Figures]) -> Figures:
    """What a switch brings in the mean over the cases that have both plans."""
    found: Figures = {}
    for family in FAMILIES:
        some = [case["switch"][family]["speedup"] for case in cases if case["switch"][family]]
        names = dict.fromkeys(name for one in some for name in one)
        found[family] = {name: fmean(one[name] for one in some if name in one) for name in names}
    return found
