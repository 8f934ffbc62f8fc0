"""REINFORCE++: the rewards that follow a token, to be whitened over all responses.

Hu (2025), "REINFORCE++" (arXiv 2501.03262), section 3. ``ppo.whiten_advantages`` whitens, over all
tokens of the iteration; it is part of the method.
"""

import torch

from puzzle_align.algos.estimators import Estimate, Samples


def estimate(samples: Samples) -> Estimate:
    """Advantage of a token: ``sum over l of gamma^l r_{t+l}``, its rewards from here on."""
    rewards = samples.of_tokens()
    following, returns = torch.zeros(len(rewards), dtype=torch.float64), torch.zeros_like(rewards)
    for t in reversed(range(rewards.shape[1])):
        following = returns[:, t] = rewards[:, t] + samples.gamma * following
    return returns.masked_fill(~samples.mask, 0.0), None
