"""The models of a PPO job: where each lies, and those that this rank holds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from puzzle_align.config.job import JobConfig
from puzzle_align.layout.topology import Topology
from puzzle_align.runtime.context import Context
from puzzle_align.runtime.groups import World, build_communicators
from puzzle_align.schedules.costs import Costs
from puzzle_align.stages.flops import action_costs
from puzzle_align.stages.setup import Engine, RoleSetup, build_role, resolve_roles


@dataclass(frozen=True)
class Models:
    """All roles' setups, and the contexts of those that are on this rank."""

    setups: Mapping[str, RoleSetup]
    contexts: Mapping[str, Context]
    row_tokens: int

    def reporter(self, role: str, data_rank: int) -> int:
        """The global rank that has what replica ``data_rank`` of a role computes."""
        setup = self.setups[role]
        return Topology(setup.plan, setup.ranks).rank(setup.plan.pipeline - 1, data_rank, 0)

    def teams(self, roles: Sequence[str]) -> list[tuple[str, ...]]:
        """The roles, in order, those together that have the same ranks and plan."""
        found: dict[tuple[object, object], list[str]] = {}
        for role in roles:
            setup = self.setups[role]
            found.setdefault((setup.ranks, setup.plan), []).append(role)
        return [tuple(team) for team in found.values()]

    def costs(self, team: Sequence[str], placement: str, *, train: bool) -> Costs | None:
        """What orders a team's actions in one stream; None: one model after the other."""
        pipeline = self.setups[team[0]].plan.pipeline
        if placement == "sequential" or len(team) == 1 or pipeline == 1:
            return None
        setups = {role: self.setups[role] for role in team}
        return action_costs(setups, self.row_tokens, frozen=() if train else team)


def open_models(config: JobConfig, engine: Engine, world: World) -> Models:
    """Build every model on its ranks. Collective over the world.

    All are connected before the first is filled: no rank waits in here for another one's weights.

    Raises:
        ValueError: for a model or a plan that does not fit.
    """
    setups = resolve_roles(config, engine, world.size)
    own = {
        role: build_communicators(setup.plan, world, setup.ranks) for role, setup in setups.items()
    }
    contexts = {
        role: build_role(role, setups[role], world, communicators)
        for role, communicators in own.items()
        if communicators is not None
    }
    return Models(setups, contexts, config.packing.row_tokens)
