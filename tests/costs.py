"""Costs of actions for tests."""

from puzzle_align.schedules.costs import ModelCosts


def uniform(
    num_positions: int,
    forward: float,
    backward: float | None = None,
    activation: float = 1.0,
    noise: float = 0.0,
) -> ModelCosts:
    """Equal costs at every virtual position; forward-only without ``backward``."""
    back = () if backward is None else (float(backward),) * num_positions
    kept = (activation,) * num_positions
    return ModelCosts((float(forward),) * num_positions, back, kept, noise)
