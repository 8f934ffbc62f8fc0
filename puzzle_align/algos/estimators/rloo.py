"""REINFORCE leave-one-out: the baseline of a response is the others to the same prompt.

Ahmadian et al. (2024), "Back to Basics", section 3.2: the baseline of a response is the mean reward
of the other K - 1, and every token gets the response's advantage.
"""

from puzzle_align.algos.estimators import Estimate, Samples


def estimate(samples: Samples) -> Estimate:
    """Advantage of a response: its reward less the mean of the other scored ones to its prompt.

    A response's reward is the sum of its tokens', the KL penalty included.
    """
    rewards = samples.of_responses()
    num_others = (samples.group_sizes() - 1).clamp(min=1)
    baseline = (samples.in_group(rewards) - rewards) / num_others
    return samples.over_tokens(rewards - baseline), None
