"""Phases of stage ppo as a plan predicts them: several models, each on ranks and a plan of its own.

Models that share ranks and plan are a team: they run in one stream, or one after the other without
a pause. Teams on ranks apart run side by side; a team that needs another one's ranks waits for it.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from puzzle_align.planning.simulate import simulate
from puzzle_align.planning.steps import Placed
from puzzle_align.schedules.actions import Program
from puzzle_align.schedules.costs import Costs
from puzzle_align.schedules.lowering import lower
from puzzle_align.schedules.timeline import Span, Timeline
from puzzle_align.schedules.timeshare import one_after_the_other, time_share
from puzzle_align.schedules.validate import validate


@dataclass(frozen=True, kw_only=True)
class PhaseModel(Placed):
    """A role's model in a phase."""

    num_microbatches: int  # on each data rank


@dataclass(frozen=True, kw_only=True)
class Phase:
    """What runs in one pass of a phase: all of ``score``, or a mini-batch of ``learn``."""

    name: str
    models: tuple[PhaseModel, ...]
    train: bool
    time_shared: bool  # where a team is of several models, on several pipeline ranks
    costs: Costs

    @property
    def rows(self) -> list[int]:
        """The first rank of every set of ranks that hold the same parts of the models."""
        return first_ranks(self.models)

    @property
    def row_names(self) -> tuple[str, ...]:
        """The rows' names: pipeline ranks, or first ranks where the models differ in those."""
        if all(self.rows == list(model.parts) for model in self.models):
            return tuple(f"P{number}" for number in range(len(self.rows)))
        return tuple(f"rank {rank}" for rank in self.rows)

    @property
    def teams(self) -> list[tuple[PhaseModel, ...]]:
        """The models, in order, those together that have the same ranks and plan."""
        found: dict[tuple[object, object], list[PhaseModel]] = {}
        for model in self.models:
            found.setdefault((model.ranks, model.plan), []).append(model)
        return [tuple(team) for team in found.values()]

    @property
    def streams(self) -> list[tuple[PhaseModel, ...]]:
        """The teams that time-share."""
        shared = self.teams if self.time_shared else []
        return [team for team in shared if len(team) > 1 and team[0].plan.pipeline > 1]

    @property
    def order(self) -> str:
        """How the models take turns, in a word."""
        if self.streams:
            return "time_shared"
        if len(self.models) == 1:
            return "alone"
        held = [rank for model in self.models for rank in model.ranks]
        return "concurrent" if len(held) == len(set(held)) else "sequential"

    def timeline(self) -> Timeline:
        """What runs when, on this phase's rows. ValueError as ``schedules.single.alone``."""
        rows = self.rows
        spans: list[list[Span]] = [[] for _ in rows]
        for team in self.teams:
            parts = {row: team[0].part(rank) for row, rank in enumerate(rows)}
            own = {row: part for row, part in parts.items() if part is not None}
            start = max((spans[row][-1].end for row in own if spans[row]), default=0.0)
            timeline = self._pass(team)
            for row, part in own.items():
                done = timeline.ranks[part]
                spans[row] += [Span(s.action, s.start + start, s.end + start) for s in done]
        return Timeline(tuple(map(tuple, spans)))

    def _pass(self, team: tuple[PhaseModel, ...]) -> Timeline:
        """One team's pass, proven, on its pipeline ranks."""
        num_ranks = team[0].plan.pipeline
        programs = [
            Program(m.role, m.num_microbatches, m.plan.virtual_pipeline, self.train) for m in team
        ]
        if team in self.streams:
            lists = time_share(programs, num_ranks, self.costs)
        else:
            lists = one_after_the_other(programs, num_ranks)
        lowered = lower(lists, programs)
        validate(lowered, programs)
        return simulate(lowered, self.costs)


def first_ranks(models: Iterable[Placed]) -> list[int]:
    """The first rank of every set of neighbouring ranks that hold the same parts of the models.

    Ranks that hold none are in no set.
    """
    models = list(models)
    bounds = {rank for model in models for rank in (*model.parts, model.ranks.stop)}
    return [rank for rank in sorted(bounds) if any(rank in model.ranks for model in models)]
