"""PPO's losses for actor and critic, and sums for their metrics.

Shapes: N response tokens of a microbatch, packed; there is no padding among them.

Every loss is a sum over the N tokens divided by ``num_tokens``, the response tokens of the whole
mini-batch over all microbatches and ranks: these shares add up to the mean over tokens under any
packing. Metrics are float64 sums over the N tokens, in the order of the names in ``POLICY_SUMS`` or
``VALUE_SUMS``; the caller adds them up and divides by ``num_tokens``. The names are TRL's, which
averages the means of microbatches.
"""

import torch

from puzzle_align.algos.advantages import MAX_LOG_RATIO, KLEstimator, kl_estimates

POLICY_SUMS = ("loss/policy_avg", "policy/approxkl_avg", "policy/clipfrac_avg", "val/ratio")
VALUE_SUMS = ("loss/value_avg", "val/clipfrac_avg")


def policy_loss(
    logps: torch.Tensor,
    old_logps: torch.Tensor,
    advantages: torch.Tensor,
    *,
    clip_ratio_low: float,
    clip_ratio_high: float,
    clip_ratio_c: float | None,
    num_tokens: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The clipped surrogate's share of the loss, a scalar, and ``POLICY_SUMS``, detached [4].

    Schulman et al. (2017), equation 7, negated: ``max(-r A, -clip(r, 1 - low, 1 + high) A)`` with
    ``r = exp(logps - old_logps)``. For negative A it has no upper bound; the dual clip of Ye et al.
    (2020, arXiv 1912.09729) adds the bound ``-c A``. As in verl, ``log r`` is clamped to [-20, 20],
    and tokens beyond have no gradient.

    ``policy/approxkl_avg`` is the mean of ``(log r)^2 / 2``; ``policy/clipfrac_avg`` counts tokens
    without a gradient because of a clip (not because of the clamp of ``log r``).

    Args:
        logps: log-probabilities of the tokens under the actor, [N], differentiable.
        old_logps: under the actor that the responses were sampled from, [N].
        advantages: [N].
        clip_ratio_low: distance of the lower bound from 1, in [0, 1].
        clip_ratio_high: distance of the upper bound from 1, at least 0.
        clip_ratio_c: the dual clip's c, above 1; None: no dual clip.
        num_tokens: of the whole mini-batch.
    """
    log_ratios = (logps.double() - old_logps.double()).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratios, advantages = log_ratios.exp(), advantages.double()
    plain = -advantages * ratios
    clipped = -advantages * ratios.clamp(1 - clip_ratio_low, 1 + clip_ratio_high)
    losses, is_clipped = torch.maximum(plain, clipped), clipped > plain
    if clip_ratio_c is not None:
        most = torch.where(advantages < 0, -advantages * clip_ratio_c, torch.inf)
        losses, is_clipped = torch.minimum(losses, most), is_clipped | (losses > most)
    total = losses.sum()
    parts = [total, (log_ratios**2).sum() / 2, is_clipped.sum().double(), ratios.sum()]
    return total / num_tokens, torch.stack(parts).detach()


def value_loss(
    values: torch.Tensor,
    old_values: torch.Tensor,
    returns: torch.Tensor,
    *,
    clip_range: float | None,
    num_tokens: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The critic's share of the loss, a scalar, and ``VALUE_SUMS``, detached [2].

    ``max((V - R)^2, (clip(V, V_old - range, V_old + range) - R)^2) / 2``, as in TRL: a value that
    has moved by more than the range towards its target has no gradient.

    Args:
        values: of the states before the tokens, [N], differentiable.
        old_values: those that the advantages were computed from, [N].
        returns: the targets, [N].
        clip_range: in score units; None: no clipping.
        num_tokens: of the whole mini-batch.
    """
    values, old_values, returns = values.double(), old_values.double(), returns.double()
    plain = (values - returns) ** 2
    clipped = plain
    if clip_range is not None:
        near = torch.clamp(values, old_values - clip_range, old_values + clip_range)
        clipped = (near - returns) ** 2
    total = torch.maximum(plain, clipped).sum() / 2
    return total / num_tokens, torch.stack([total, (clipped > plain).sum().double()]).detach()


def entropy_bonus(entropies: torch.Tensor, *, coefficient: float, num_tokens: int) -> torch.Tensor:
    """The entropy bonus's share of the loss, a scalar: ``-coefficient`` times the mean entropy.

    Schulman et al. (2017), equation 9.

    Args:
        entropies: of the actor's distribution at each token, [N], in nats.
        coefficient: loss a nat.
        num_tokens: of the whole mini-batch.
    """
    return -coefficient * entropies.double().sum() / num_tokens


def kl_loss(
    logps: torch.Tensor,
    ref_logps: torch.Tensor,
    *,
    estimator: KLEstimator,
    coefficient: float,
    num_tokens: int,
) -> torch.Tensor:
    """The KL's share of the loss, a scalar: ``coefficient`` times the mean KL to the reference.

    As a loss k1 has a gradient of mean 0 (``kl_estimates``): choose k2 or k3.

    Args:
        logps: log-probabilities of the tokens under the actor, [N], differentiable.
        ref_logps: under the reference, [N].
        coefficient: loss a nat.
        num_tokens: of the whole mini-batch.
    """
    return coefficient * kl_estimates(logps, ref_logps, estimator).sum() / num_tokens
