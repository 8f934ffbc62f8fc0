"""Group relative policy optimization: a response's reward, standardized in its group.

Shao et al. (2024), "DeepSeekMath", section 4.1.2.
"""

from puzzle_align.algos.estimators import Estimate, Samples
from puzzle_align.algos.estimators.dr_grpo import centred

EPSILON = 1e-4  # added to the standard deviation, as in TRL; verl adds 1e-6


def estimate(samples: Samples) -> Estimate:
    """Advantage of a response: ``(reward - mean) / (standard deviation + 1e-4)``.

    The mean is of the scored responses to the prompt. The standard deviation (unbiased) is of
    these, or with ``scale_rewards`` ``batch`` of all responses of the iteration, or with ``none``
    there is none.
    """
    advantages = centred(samples)
    if samples.scale_rewards == "group":
        variance = samples.in_group(advantages**2) / (samples.group_sizes() - 1).clamp(min=1)
        advantages = advantages / (variance.sqrt() + EPSILON)
    elif samples.scale_rewards == "batch":
        assert samples.batch_std is not None, "the caller computes it over all owners"
        advantages = advantages / (samples.batch_std + EPSILON)
    return samples.over_tokens(advantages), None
