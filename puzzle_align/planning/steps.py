"""Training steps of a preference run as a plan predicts them, for every placement of the reference.

A row of these timelines is a set of ranks that hold the same parts of the models: under one plan,
a pipeline rank.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from puzzle_align.layout.plan import ParallelPlan
from puzzle_align.planning.simulate import simulate
from puzzle_align.schedules.actions import Program
from puzzle_align.schedules.costs import Costs
from puzzle_align.schedules.lookahead import lookahead_step
from puzzle_align.schedules.lowering import lower
from puzzle_align.schedules.single import alone
from puzzle_align.schedules.timeline import Timeline


@dataclass(frozen=True, kw_only=True)
class Placed:
    """A role's model on its ranks."""

    role: str
    plan: ParallelPlan
    ranks: range

    @property
    def parts(self) -> range:
        """The first of the ranks that hold each pipeline rank's part of the model."""
        return self.ranks[:: self.plan.data * self.plan.tensor]

    def part(self, rank: int) -> int | None:
        """The pipeline rank whose part of the model ``rank`` holds; None if it holds none."""
        if rank not in self.ranks:
            return None
        return (rank - self.ranks.start) // (self.plan.data * self.plan.tensor)


@dataclass(frozen=True, kw_only=True)
class PlacedModel(Placed):
    """A role's model in the steps of a run."""

    num_microbatches: Callable[[int], int]  # of a step (from 0), on each data rank


@dataclass(frozen=True, kw_only=True)
class PreferenceRun:
    """What runs in the training steps of a preference run, and at what costs.

    ``placement`` is the reference's: sequential, time_shared or concurrent. The reference is None
    where none runs while the policy trains.
    """

    policy: PlacedModel
    reference: PlacedModel | None
    placement: str
    costs: Costs
    num_steps: int

    @property
    def rows(self) -> list[int]:
        """The first rank of every row."""
        models = [self.policy] if self.reference is None else [self.policy, self.reference]
        return sorted({rank for model in models for rank in model.parts})

    @property
    def row_names(self) -> tuple[str, ...]:
        """The rows' names: pipeline ranks, or first ranks where the models differ in those."""
        if self.rows == list(self.policy.parts):
            return tuple(f"P{number}" for number in range(len(self.rows)))
        return tuple(f"rank {rank}" for rank in self.rows)

    def steps(self, start: int = 0) -> Iterator[Timeline]:
        """Steps from ``start`` to the last, each from time 0, of a run that begins at ``start``.

        ValueError where a model's own schedule cannot be made (``schedules.single``).
        """
        if self.reference is None:
            return (self._alone(self.policy, step) for step in range(start, self.num_steps))
        by_placement = {
            "sequential": self._sequential,
            "time_shared": self._time_shared,
            "concurrent": self._concurrent,
        }
        return by_placement[self.placement](self.reference, start)

    def _sequential(self, reference: PlacedModel, start: int) -> Iterator[Timeline]:
        for step in range(start, self.num_steps):
            yield self._alone(reference, step).then(self._alone(self.policy, step))

    def _time_shared(self, reference: PlacedModel, start: int) -> Iterator[Timeline]:
        policy, done = self.policy, ()
        for step in range(start, self.num_steps):
            ahead = policy.num_microbatches(step + 1) if step + 1 < self.num_steps else 0
            made = lookahead_step(
                self._program(policy, step),
                reference.role,
                ahead,
                num_ranks=policy.plan.pipeline,
                costs=self.costs,
                done=done,
            )
            done = made.done
            yield simulate(made.lists, self.costs)

    def _concurrent(self, reference: PlacedModel, start: int) -> Iterator[Timeline]:
        for step in range(start, self.num_steps):
            timeline = self._alone(self.policy, step)
            if step + 1 < self.num_steps:
                timeline = _beside(timeline, self._alone(reference, step + 1))
            if step == start:
                timeline = self._alone(reference, step).then(timeline)
            yield timeline

    def _alone(self, model: PlacedModel, step: int) -> Timeline:
        """One model's pass over a step's microbatches, on this run's rows."""
        program, num_ranks = self._program(model, step), model.plan.pipeline
        lists = lower(alone(program, num_ranks), [program])
        timeline = simulate(lists, self.costs)
        parts = (model.part(rank) for rank in self.rows)
        return Timeline(tuple(() if part is None else timeline.ranks[part] for part in parts))

    def _program(self, model: PlacedModel, step: int) -> Program:
        return Program(
            model.role,
            model.num_microbatches(step),
            num_chunks=model.plan.virtual_pipeline,
            backward=model is self.policy,
        )


def _beside(one: Timeline, other: Timeline) -> Timeline:
    """Two timelines of the same rows, no row at work in both."""
    return Timeline(tuple(a + b for a, b in zip(one.ranks, other.ranks, strict=True)))
