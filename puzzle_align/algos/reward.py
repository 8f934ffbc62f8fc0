"""The reward model's loss of preference pairs; formulas as TRL's RewardTrainer has them.

Shapes: B pairs. The loss gives one value a pair; the caller divides by the global number of pairs.
"""

import torch
from torch.nn.functional import logsigmoid


def bradley_terry_loss(
    chosen: torch.Tensor,
    rejected: torch.Tensor,
    margins: torch.Tensor,
    *,
    center_rewards_coefficient: float = 0.0,
) -> torch.Tensor:
    """``-log s(c - r - margin) + coefficient (c + r)^2``, [B].

    Args:
        chosen: rewards c of the chosen responses, [B].
        rejected: rewards r of the rejected ones, [B].
        margins: by how much c is to be above r, [B]; 0 asks for no more than any other pair.
        center_rewards_coefficient: pulls the rewards of a pair to a mean of 0, which the first
            term leaves open.
    """
    losses = -logsigmoid(chosen - rejected - margins)
    if center_rewards_coefficient:
        losses = losses + center_rewards_coefficient * (chosen + rejected) ** 2
    return losses
