"""Costs of actions: the times that time-sharing and simulation use."""

from collections.abc import Mapping
from dataclasses import dataclass

from puzzle_align.schedules.actions import Action, Kind


@dataclass(frozen=True, slots=True)
class ModelCosts:
    """Times of one model's actions by virtual position (``chunk * P + rank``).

    They are above 0, in any one unit: two actions that take no time can wait for each other in the
    lists that time-sharing makes.

    ``backward`` is empty for a forward-only model. ``activation`` is the size of the activations
    that one forward keeps for its backward, in any unit that all models of a schedule share;
    empty: 1 everywhere.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...] = ()
    activation: tuple[float, ...] = ()

    def of(self, action: Action, rank: int, num_ranks: int) -> float:
        """Time of a compute action on pipeline rank ``rank``."""
        position = action.chunk * num_ranks + rank
        times = self.forward if action.kind is Kind.FORWARD else self.backward
        return times[position]

    def kept(self, action: Action, rank: int, num_ranks: int) -> float:
        """Size of the activations that a forward at the action's position keeps."""
        return self.activation[action.chunk * num_ranks + rank] if self.activation else 1.0


Costs = Mapping[str, ModelCosts]
