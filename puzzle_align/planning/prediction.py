"""Prediction of a phase under a plan: timelines and peak activations, from its action lists.

A lane of these timelines is a set of ranks that hold the same parts of the models: under one plan,
a pipeline rank (``layout.job_plan``).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from puzzle_align.layout.job_plan import ContextPlan, Order, Phase
from puzzle_align.schedules.actions import Action, Program
from puzzle_align.schedules.costs import Costs, ModelCosts
from puzzle_align.schedules.dependencies import Dependencies
from puzzle_align.schedules.lookahead import lookahead_step
from puzzle_align.schedules.registry import schedule_for, schedule_named
from puzzle_align.schedules.timeline import Span, Timeline
from puzzle_align.schedules.timeshare import one_after_the_other, time_share
from puzzle_align.schedules.timing import TransferTime, simulate, timeline_of

Count = Callable[[int], int]  # number of a pass -> its microbatches on each data rank


@dataclass(frozen=True, kw_only=True)
class PredictedRun:
    """A phase's ``num_passes`` passes: training steps, or mini-batches.

    ``num_microbatches`` and ``costs`` are by role; ``transfer`` is the time of a transfer, in the
    costs' unit.
    """

    phase: Phase
    num_microbatches: Mapping[str, Count]
    costs: Costs
    num_passes: int = 1
    transfer: float | TransferTime = 0.0

    def in_order(self, order: Order) -> "PredictedRun":
        """The same work with another order of the contexts."""
        return replace(self, phase=replace(self.phase, order=order))

    def passes(self, start: int = 0) -> Iterator[Timeline]:
        """Timelines of the passes of a run that begins at ``start``, each from time 0.

        Raises ValueError if a model's schedule cannot be made (``schedules.registry``).
        """
        if not self.phase.is_fed:
            return (self._unfed(number) for number in range(start, self.num_passes))
        by_order = {
            "sequential": self._reference_before,
            "time_shared": self._reference_in_bubbles,
            "concurrent": self._reference_beside,
        }
        return by_order[self.phase.order](start)

    def _unfed(self, number: int) -> Timeline:
        """A pass without lookahead: groups on separate ranks in parallel, else in sequence."""
        spans: list[list[Span]] = [[] for _ in self.phase.lanes]
        for group in self.phase.colocated:
            timeline = self._on_lanes(group[0], self._of_group(group, number))
            here = [lane for lane, done in enumerate(timeline.ranks) if done]
            start = max((spans[lane][-1].end for lane in here if spans[lane]), default=0.0)
            for lane in here:
                done = timeline.ranks[lane]
                spans[lane] += [Span(s.action, s.start + start, s.end + start) for s in done]
        return Timeline(tuple(map(tuple, spans)))

    def _reference_before(self, start: int) -> Iterator[Timeline]:
        for number in range(start, self.num_passes):
            first, *rest = (self._alone(context, number) for context in self.phase.contexts)
            for timeline in rest:
                first = first.then(timeline)
            yield first

    def _reference_in_bubbles(self, start: int) -> Iterator[Timeline]:
        (trained,), frozen = self.phase.trained, self._frozen()
        done: tuple[int, ...] = ()
        for number in range(start, self.num_passes):
            is_last = number + 1 == self.num_passes
            step = lookahead_step(
                self._program(trained, number),
                frozen.role,
                0 if is_last else self.num_microbatches[frozen.role](number + 1),
                num_ranks=trained.plan.pipeline,
                costs=self.costs,
                done=done,
            )
            done = step.done
            yield self._on_lanes(frozen, simulate(step.lists, self.costs, transfer=self.transfer))

    def _reference_beside(self, start: int) -> Iterator[Timeline]:
        (trained,), frozen = self.phase.trained, self._frozen()
        for number in range(start, self.num_passes):
            timeline = self._alone(trained, number)
            if number + 1 < self.num_passes:
                ahead = self._alone(frozen, number + 1)  # each lane is busy in at most one
                pairs = zip(timeline.ranks, ahead.ranks, strict=True)
                timeline = Timeline(tuple(one + other for one, other in pairs))
            if number == start:
                timeline = self._alone(frozen, number).then(timeline)
            yield timeline

    def _frozen(self) -> ContextPlan:
        (frozen,) = (c for c in self.phase.contexts if c.workload != "train")
        return frozen

    def _alone(self, context: ContextPlan, number: int) -> Timeline:
        """Timeline of one context in a pass, on this phase's lanes."""
        return self._on_lanes(context, self._of_group([context], number))

    def _of_group(self, group: Sequence[ContextPlan], number: int) -> Timeline:
        """Timeline of colocated contexts in a pass, by pipeline rank."""
        programs, lists = self._lists(group, number)
        graph = Dependencies(programs, len(lists))
        return timeline_of(lists, graph, self.costs, self.transfer)

    def _on_lanes(self, context: ContextPlan, timeline: Timeline) -> Timeline:
        """A context's timeline by lane of the phase, where other lanes are idle."""
        parts = (context.part(rank) for rank in self.phase.lanes)
        return Timeline(tuple(() if part is None else timeline.ranks[part] for part in parts))

    def _lists(
        self, group: Sequence[ContextPlan], number: int
    ) -> tuple[list[Program], list[list[Action]]]:
        """Programs of colocated contexts, and their compute lists."""
        programs = [self._program(context, number) for context in group]
        num_ranks = group[0].plan.pipeline
        if self.phase.shares_time(group):
            return programs, time_share(programs, num_ranks, self.costs)
        return programs, one_after_the_other(programs, num_ranks)

    def _program(self, context: ContextPlan, number: int) -> Program:
        return Program(
            context.role,
            self.num_microbatches[context.role](number),
            num_chunks=context.plan.virtual_pipeline,
            backward=context.workload == "train",
            schedule=context.plan.schedule,
        )


def most_kept(run: PredictedRun) -> dict[str, tuple[float, ...]]:
    """Peak activations in a run's first pass, by trained role and pipeline rank.

    In the unit of the costs. Colocated models together keep the largest of their figures:
    time-sharing never keeps more than models one after the other (``schedules.timeshare``).
    """
    by_role: dict[str, tuple[float, ...]] = {}
    for group in run.phase.colocated:
        trained = [context for context in group if context.workload == "train"]
        alone = [_kept_alone(run, context) for context in trained]
        most = tuple(map(max, zip(*alone, strict=True)))
        by_role |= {context.role: most for context in trained}
    return by_role


def _kept_alone(run: PredictedRun, context: ContextPlan) -> tuple[float, ...]:
    plan, count = context.plan, run.num_microbatches[context.role](0)
    if not schedule_named(plan.schedule, plan.virtual_pipeline).holds_all:
        count = min(count, 3 * plan.pipeline)  # later groups of P repeat the third
    activation = run.costs[context.role].activation
    program = Program("", count, plan.virtual_pipeline, schedule=plan.schedule)
    return _peaks(program, plan.pipeline, activation)


@lru_cache(maxsize=4096)
def _peaks(program: Program, num_ranks: int, activation: tuple[float, ...]) -> tuple[float, ...]:
    """Peak activations of a model's schedule alone, by pipeline rank."""
    costs = {program.model: ModelCosts((), activation=activation)}
    lists = schedule_for(program, num_ranks)
    return tuple(Dependencies([program], num_ranks).peaks(lists, costs))
