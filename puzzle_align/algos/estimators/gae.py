"""Generalized advantage estimation, from a critic's values.

Schulman et al. (2016), equation 16: ``A_t = sum over l of (gamma lam)^l delta_{t+l}`` with
``delta_t = r_t + gamma V_{t+1} - V_t``, to the end of the response. With ``lam`` 0 that is
``delta_t`` (equation 17), with 1 the discounted rewards less ``V_t`` (equation 18).

After the last token V is 0 if the response ended, and ``final_values`` if it was truncated, since
it would have gone on and earned more. This bootstrap is right if truncated responses get no score,
or with ``gamma`` < 1: else the critic, trained on these targets, adds one score to another and its
values grow without bound.
"""

import torch

from puzzle_align.algos.estimators import Estimate, Samples


def estimate(samples: Samples) -> Estimate:
    """Advantages and the critic's targets (advantage plus value), float64 [n, T] each."""
    assert samples.values is not None and samples.final_values is not None, "there is no critic"
    rewards, values, mask = samples.rewards.double(), samples.values.double(), samples.mask
    next_values = samples.final_values.double().masked_fill(samples.ended, 0.0)
    advantage = torch.zeros_like(next_values)
    advantages = torch.zeros_like(rewards)
    for t in reversed(range(rewards.shape[1])):
        is_token = mask[:, t]
        delta = rewards[:, t] + samples.gamma * next_values - values[:, t]
        advantage = torch.where(
            is_token, delta + samples.gamma * samples.lam * advantage, advantage
        )
        next_values = torch.where(is_token, values[:, t], next_values)
        advantages[:, t] = advantage.masked_fill(~is_token, 0.0)
    return advantages, advantages + values.masked_fill(~mask, 0.0)
