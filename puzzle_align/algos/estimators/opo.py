"""On-policy RL with the optimal baseline: the group's mean reward, weighted by length.

Hao et al. (2025), "On-Policy RL with Optimal Reward Baseline" (arXiv 2505.23585), section 3.2: this
baseline has the least variance if a response's squared gradient grows with its length.
"""

from puzzle_align.algos.estimators import Estimate, Samples


def estimate(samples: Samples) -> Estimate:
    """Advantage of a response: its reward less the mean of the group's, weighted by tokens."""
    rewards, lengths = samples.of_responses(), samples.mask.sum(dim=1).double()
    baseline = samples.in_group(lengths * rewards) / samples.in_group(lengths).clamp(min=1)
    return samples.over_tokens(rewards - baseline), None
