"""Report of a search: the best plans side by side, and why the others are slower."""

from collections.abc import Iterator, Sequence

from puzzle_align.layout.job_plan import ContextPlan
from puzzle_align.layout.plan import ParallelPlan, layers_text
from puzzle_align.planning.picture.panel import time_text
from puzzle_align.planning.search.evaluation import Planned
from puzzle_align.planning.search.searches import SearchResult

_NOTHING = 1e-3  # share of an iteration below which differences are not reported


def plan_text(planned: Planned) -> str:
    """Format a plan: ``actor (P4, D2, T1) V2, critic the same, samples (P1, D4, T2), ...``."""
    parts = []
    first: ContextPlan | None = None
    for role, context in planned.plan.models.items():
        if first is None:
            first = context
            parts.append(f"{role} {_grid_text(context.plan)}{_ranks(context, planned)}")
        elif context.plan.grid != first.plan.grid or context.ranks != first.ranks:
            parts.append(f"{role} {_grid_text(context.plan)}{_ranks(context, planned)}")
    for phase in planned.plan.phases:
        if phase.name == "generate":
            (sampling,) = phase.contexts
            parts.append(f"samples {_grid_text(sampling.plan)}{_ranks(sampling, planned)}")
            parts.append(f"batches of {planned.settings.decode_batch_size}")
        elif len(phase.contexts) > 1:
            parts.append(f"{phase.name} {phase.order.replace('_', '-')}")
        elif phase.once:
            parts.append("reference before training")
    parts.append(f"rows of {planned.settings.row_tokens}")
    recompute = {context.options.recompute for context in planned.plan.trained.values()}
    if recompute != {"none"}:
        parts.append(f"recompute {', '.join(sorted(recompute))}")
    return ", ".join(parts)


def _grid_text(plan: ParallelPlan) -> str:
    chunks = f" V{plan.virtual_pipeline}" if plan.virtual_pipeline > 1 else ""
    layers = f" layers {layers_text(plan)}" if plan.pipeline_layers and plan.pipeline <= 8 else ""
    return f"(P{plan.pipeline}, D{plan.data}, T{plan.tensor}){chunks}{layers}"


def _ranks(context: ContextPlan, planned: Planned) -> str:
    ranks = sorted(context.ranks)
    if len(ranks) == planned.plan.world_size:
        return ""
    return f" on {ranks[0]}-{ranks[-1]}"


def best_table(best: Sequence[Planned]) -> list[str]:
    """Table of the best plans, the fastest first: a line of times for each, then descriptions."""
    names = list(dict.fromkeys(name for planned in best for name in planned.phases))
    title = f"{'plan':>4} {'iteration':>10} " + " ".join(f"{name:>10}" for name in names)
    lines = [f"{title} {'idle':>6} {'memory':>10}"]
    for number, planned in enumerate(best, start=1):
        times = (
            time_text(planned.phases[name].seconds) if name in planned.phases else "-"
            for name in names
        )
        cells = " ".join(f"{text:>10}" for text in times)
        memory = f"{planned.peak_bytes / 2**30:.2f} GiB"
        whole = time_text(planned.seconds)
        lines.append(
            f"{number:>4} {whole:>10} {cells} {100 * idle_of(planned):>5.1f}% {memory:>10}"
        )
    return lines


def idle_of(planned: Planned) -> float:
    """Idle share of pipeline ranks in the passes."""
    timed = [phase for phase in planned.phases.values() if phase.idle > 0]
    total = sum(phase.seconds for phase in timed)
    return sum(phase.idle * phase.seconds for phase in timed) / total if total else 0.0


def why_slower(best: Planned, other: Planned) -> str:
    """Phases in which a plan loses or gains: ``loses by +0.12 s generate, -0.03 s switch``."""
    names = dict.fromkeys([*best.phases, *other.phases])
    differences = []
    for name in names:
        seconds = _seconds(other, name) - _seconds(best, name)
        if abs(seconds) > _NOTHING * best.seconds:
            sign = "+" if seconds > 0 else "-"
            differences.append((seconds, f"{sign}{time_text(abs(seconds))} {name}"))
    if not differences:
        return "as fast, within a thousandth"
    return f"loses by {', '.join(text for _, text in sorted(differences, key=lambda one: -one[0]))}"


def _seconds(planned: Planned, name: str) -> float:
    return planned.phases[name].seconds if name in planned.phases else 0.0


def report_lines(outcome: SearchResult) -> Iterator[str]:
    """Lines of the report: the table, every plan in words, and why it is slower than the first."""
    best = list({plan_text(planned): planned for planned in reversed(outcome.best)}.values())[::-1]
    yield from best_table(best)
    for number, planned in enumerate(best, start=1):
        why = "" if number == 1 else f"; {why_slower(best[0], planned)}"
        yield f"  {number}: {plan_text(planned)}{why}"
    yield (
        f"{outcome.num_plans} plans in the search; a whole iteration was predicted for "
        f"{outcome.num_evaluated} of them"
    )


def limit_text(before: Planned, after: Planned) -> str:
    """Text on the phase that limits the speed-up of a larger cluster: it shrinks least."""
    ranks = after.plan.world_size / before.plan.world_size
    excess = {
        name: phase.seconds - _seconds(before, name) / ranks for name, phase in after.phases.items()
    }
    name = max(excess, key=lambda each: excess[each])
    if excess[name] <= _NOTHING * after.seconds:
        return "nothing: in proportion"
    why = ""
    idle = after.phases[name].idle
    if idle > before.phases[name].idle + 0.02 if name in before.phases else idle > 0.02:
        why = f", {100 * idle:.0f}% idle"
    return f"{name}{why} ({time_text(excess[name])} over proportion)"
