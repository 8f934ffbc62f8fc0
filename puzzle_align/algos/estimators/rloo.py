"""REINFORCE leave-one-out: the baseline of a response is the others to the same prompt.

Ahmadian et al. (2024), "Back to Basics", section 3.2: the baseline of a response is the mean reward
of the other K - 1, and every token gets the response's advantage.
"""

import torch

from puzzle_align.algos.estimators import Estimate, Samples


def estimate(samples: Samples) -> Estimate:
    """Advantage of a response: its reward less the mean of the other scored ones to its prompt.

    A response's reward is the sum of its tokens', the KL penalty included. Without another scored
    response to its prompt the advantage is 0.
    """
    rewards = samples.rewards.double().masked_fill(~samples.mask, 0.0).sum(dim=1)
    is_scored = samples.has_score.double()
    together = (samples.prompts[:, None] == samples.prompts).double() * is_scored
    number = together.sum(dim=1)
    others = (together @ (rewards * is_scored) - rewards) / (number - 1).clamp(min=1)
    advantages = torch.where(number > 1, rewards - others, torch.zeros_like(rewards))
    return advantages[:, None] * samples.mask, None
