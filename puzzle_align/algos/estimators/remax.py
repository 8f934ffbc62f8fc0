"""ReMax: the baseline of a response is the reward of the greedy response to its prompt.

Li et al. (2023), "ReMax" (arXiv 2310.10505), section 4.
"""

from puzzle_align.algos.estimators import Estimate, Samples


def estimate(samples: Samples) -> Estimate:
    """Advantage of a token: the rewards from it to the end, less the greedy response's.

    The greedy response has no KL penalty, as in verl. Without its score the advantage is 0
    (before ``ppo.whiten_advantages``).
    """
    assert samples.baselines is not None, "there are no greedy responses"
    rewards = samples.of_tokens()
    following = rewards.flip(1).cumsum(1).flip(1)
    advantages = following - samples.baselines.double()[:, None]
    is_unknown = samples.baselines.isnan()[:, None] | ~samples.mask
    return advantages.masked_fill(is_unknown, 0.0), None
