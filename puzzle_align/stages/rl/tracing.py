"""Traced iterations: score and learn as measured, beside what was predicted of as many rows."""

from collections.abc import Sequence
from dataclasses import replace

from puzzle_align.config.job import JobConfig
from puzzle_align.layout.job_plan import JobPlan, Phase
from puzzle_align.planning.prediction import PredictedRun
from puzzle_align.runtime.groups.world import World
from puzzle_align.schedules.timeline import Timeline
from puzzle_align.stages.costs import JobCosts
from puzzle_align.stages.prediction import predicted_run
from puzzle_align.stages.tracing import Passes, Tracer, num_microbatches, pass_name


def iteration_tracer(config: JobConfig, plan: JobPlan, world: World, costs: JobCosts) -> Tracer:
    """Draws the score phase and every mini-batch of the learn phase; generation has no lists."""
    phases = [plan.phase("score"), plan.phase("learn")]
    contexts = tuple(context for phase in phases for context in phase.contexts)
    drawn = Phase(name="iteration", order="sequential", contexts=contexts)

    def predict(_first: int, _step: int, lanes: Sequence[Passes]) -> Timeline:
        """Passes one after the other, each of the microbatches that it was measured with."""
        timeline = Timeline(((),) * len(drawn.lanes))
        for phase in phases:
            for run in _runs(costs, phase, lanes):
                (own,) = run.passes()
                timeline = timeline.then(_on_lanes(own, run.phase, drawn.lanes))
        return timeline

    return Tracer(config, world, drawn, predict)


def _runs(costs: JobCosts, phase: Phase, lanes: Sequence[Passes]) -> list[PredictedRun]:
    """One for every pass of a phase; the critic may be trained alone."""
    counts: dict[str, list[int]] = {}
    for group in phase.colocated:
        for some in (group, *((context,) for context in group)):
            found = num_microbatches(lanes, pass_name(phase, some))
            if found:
                counts |= {context.role: found for context in some}
    at_work = tuple(context for context in phase.contexts if context.role in counts)
    own = replace(phase, contexts=at_work)
    num_passes = max(map(len, counts.values()), default=0)
    return [
        predicted_run(costs, own, {r: lambda _, n=c[number]: n for r, c in counts.items()})
        for number in range(num_passes)
    ]


def _on_lanes(timeline: Timeline, phase: Phase, lanes: Sequence[int]) -> Timeline:
    """A phase's timeline on the lanes of a picture that shows more; the others are idle."""
    own = {
        tuple(context.part(rank) for context in phase.contexts): spans
        for rank, spans in zip(phase.lanes, timeline.ranks, strict=True)
    }
    return Timeline(
        tuple(own.get(tuple(c.part(rank) for c in phase.contexts), ()) for rank in lanes)
    )
