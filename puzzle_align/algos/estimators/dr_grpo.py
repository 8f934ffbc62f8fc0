"""GRPO "done right": a response's reward less the mean of the group, not scaled.

Liu et al. (2025), "Understanding R1-Zero-Like Training", section 3.2: to divide by the group's
standard deviation favours prompts that are too easy or too hard.
"""

import torch

from puzzle_align.algos.estimators import Estimate, Samples


def estimate(samples: Samples) -> Estimate:
    """Advantage of a response: its reward less the mean of all scored ones to its prompt."""
    return samples.over_tokens(centred(samples)), None


def centred(samples: Samples) -> torch.Tensor:
    """Rewards of the responses less the means of their groups, float64 [n]."""
    rewards = samples.of_responses()
    return rewards - samples.in_group(rewards) / samples.group_sizes().clamp(min=1)
