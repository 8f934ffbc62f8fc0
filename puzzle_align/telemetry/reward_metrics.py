"""Metrics of a reward model under the names of TRL's RewardTrainer.

Ranks put their pairs' rows together in one table: the least and the greatest reward are then those
of the global batch, whatever the plan.

Invariants (the tests assert them):
- the metrics depend on the table's rows alone, not on which rank or microbatch gave which;
- a pair of equal rewards is half right (TRL counts 0 there).

Shapes: n pairs, C = 3 values a pair.
"""

import torch
from torch import Tensor

from puzzle_align.telemetry.preference_metrics import accuracy

NUM_VALUES = 3


def pair_values(losses: Tensor, chosen: Tensor, rejected: Tensor) -> Tensor:
    """Rows of pairs from losses and rewards, [n] each: float64 [n, C], detached."""
    return torch.stack([losses, chosen, rejected], dim=1).detach().double()


def summarize(values: Tensor) -> dict[str, float]:
    """Metrics by name from ``values`` float64 [n, C], n > 0.

    ``min_reward``, ``mean_reward`` and ``max_reward`` are over both responses of all pairs.
    """
    losses, chosen, rejected = values.unbind(dim=1)
    rewards = values[:, 1:]
    metrics = {
        "loss": losses.mean(),
        "accuracy": accuracy(chosen, rejected).mean(),
        "margin": (chosen - rejected).mean(),
        "min_reward": rewards.min(),
        "mean_reward": rewards.mean(),
        "max_reward": rewards.max(),
    }
    return {name: value.item() for name, value in metrics.items()}
