"""Preference metrics under TRL's names: a line of values a pair, and their means.

Invariants (the tests assert them):
- every pair gives one line on one rank, so a table of a global batch's pairs that is summed over
  ranks gives the metrics of that batch, whatever the plan and the packing;
- the denominator is the number of pairs, never the number of microbatches or ranks;
- a pair is right if its chosen reward is above the rejected one, and half right if they are equal:
  a policy equal to its reference has learnt nothing, and has accuracy 1/2 (TRL counts 0 there).

Shapes: n pairs, C = len(NAMES) metrics.
"""

import torch
from torch import Tensor

NAMES = (
    "loss",
    "rewards/chosen",
    "rewards/rejected",
    "rewards/accuracies",
    "rewards/margins",
    "logps/chosen",
    "logps/rejected",
)


def pair_values(
    losses: Tensor,
    chosen_rewards: Tensor,
    rejected_rewards: Tensor,
    chosen_logps: Tensor,
    rejected_logps: Tensor,
) -> Tensor:
    """Every metric of every pair: float64 [n, C] in the order of ``NAMES``.

    All arguments are [n]. The result is detached.
    """
    chosen, rejected = chosen_rewards.detach().double(), rejected_rewards.detach().double()
    per_pair = (
        losses.detach().double(),
        chosen,
        rejected,
        accuracy(chosen, rejected),
        chosen - rejected,
        chosen_logps.detach().double(),
        rejected_logps.detach().double(),
    )
    return torch.stack(per_pair, dim=1)


def means(values: Tensor) -> dict[str, float]:
    """Metrics by name from ``values`` float64 [n, C], n > 0."""
    assert len(values) > 0
    return dict(zip(NAMES, values.mean(dim=0).tolist(), strict=True))


def accuracy(chosen: Tensor, rejected: Tensor) -> Tensor:
    """1 where a pair's rewards [n] are right, 0 where wrong, 1/2 where equal; float64 [n]."""
    return 0.5 * ((chosen > rejected).double() + (chosen >= rejected).double())
