"""Costs of actions, and peaks of activations, for tests."""

from collections.abc import Sequence

from puzzle_align.schedules.actions import Action, Program
from puzzle_align.schedules.costs import ModelCosts
from puzzle_align.schedules.dependencies import Dependencies
from puzzle_align.schedules.validate import validate


def uniform(
    num_positions: int,
    forward: float,
    backward: float | None = None,
    activation: float = 1.0,
) -> ModelCosts:
    """Equal costs at every virtual position; forward-only without ``backward``."""
    back = () if backward is None else (float(backward),) * num_positions
    kept = (activation,) * num_positions
    return ModelCosts((float(forward),) * num_positions, back, kept)


def validated_peaks(lists: Sequence[Sequence[Action]], programs: Sequence[Program]) -> list[float]:
    """Validate lowered lists; peak live activations of every rank, of size 1 each."""
    validate(lists, programs)
    computed = [[action for action in actions if action.kind.is_compute] for actions in lists]
    sizes = {program.model: ModelCosts(()) for program in programs}
    return Dependencies(programs, len(lists)).peaks(computed, sizes)
