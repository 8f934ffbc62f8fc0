"""Preference metrics under TRL's names, as sums that ranks can add and means over pairs.

Invariants (the tests assert them):
- the sums of two batches add up to the sums of their union, so a vector all-reduced over
  data-parallel ranks (and added over microbatches) gives the metrics of the global batch;
- the denominator is the number of pairs, never the number of microbatches or ranks;
- a pair is right if its chosen reward is above the rejected one, and half right if they are equal:
  a policy equal to its reference has learnt nothing, and has accuracy 1/2 (TRL counts 0 there).

Shapes: B pairs, C = len(NAMES) metrics.
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


def sums(
    losses: Tensor,
    chosen_rewards: Tensor,
    rejected_rewards: Tensor,
    chosen_logps: Tensor,
    rejected_logps: Tensor,
) -> Tensor:
    """Sum of every metric over the pairs: float64 [C] in the order of ``NAMES``.

    All arguments are [B]; B = 0 gives zeros. The result is detached.
    """
    chosen, rejected = chosen_rewards.detach().double(), rejected_rewards.detach().double()
    per_pair = (
        losses.detach().double(),
        chosen,
        rejected,
        0.5 * ((chosen > rejected).double() + (chosen >= rejected).double()),
        chosen - rejected,
        chosen_logps.detach().double(),
        rejected_logps.detach().double(),
    )
    return torch.stack([metric.sum() for metric in per_pair])


def means(sums: Tensor, num_pairs: int) -> dict[str, float]:
    """Metrics by name from ``sums`` [C] over ``num_pairs`` pairs of all ranks and microbatches."""
    assert num_pairs > 0, num_pairs
    return dict(zip(NAMES, (sums.double() / num_pairs).tolist(), strict=True))
