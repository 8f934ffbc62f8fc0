"""The losses of unpaired preference data; formulas as TRL 1.16's KTOTrainer has them.

Shapes: B responses. A loss is one value a response; the caller divides by the global number.
"""

import torch

from puzzle_align.config.sections.preference import KTOConfig


def kto_loss(
    log_ratios: torch.Tensor, labels: torch.Tensor, kl: float, kto: KTOConfig
) -> torch.Tensor:
    """KTO's losses: ``w (1 - s(beta (r - z)))`` if desirable, else ``w (1 - s(beta (z - r)))``.

    KTO (arXiv 2402.01306, equation 7) has the batch's KL divergence as z; the unpaired form of
    APO-zero (arXiv 2408.06266, equation 7) is the same against z = 0. w is ``desirable_weight`` or
    ``undesirable_weight``.

    Args:
        log_ratios: r, the policy's summed log-probability less the reference's, [B].
        labels: 1 of desirable responses, 0 of others, [B].
        kl: z, from ``kl_divergence``; 0 where ``kto.estimates_kl`` is false.

    Returns:
        [B], differentiable.
    """
    scaled = kto.beta * (log_ratios - kl)
    return torch.where(
        labels > 0,
        kto.desirable_weight * torch.sigmoid(-scaled),
        kto.undesirable_weight * torch.sigmoid(scaled),
    )


def kl_divergence(policy: torch.Tensor, reference: torch.Tensor) -> float:
    """KTO's z: the policy's KL to the reference on responses to other prompts, at least 0.

    Args:
        policy, reference: summed log-probabilities of a batch's mismatched responses, [B].
    """
    return (policy - reference).mean().clamp(min=0).item()
