"""PPO's losses for actor and critic, and sums for their metrics.

Shapes: N response tokens of a microbatch, packed; there is no padding among them.

Every loss is a sum over the N tokens divided by ``num_tokens``, the response tokens of the whole
mini-batch over all microbatches and ranks: these shares add up to the mean over tokens under any
packing. The actor's losses take other ``weights`` [N], too (``token_weights``). Metrics are float64
sums over the N tokens, in the order of the names in ``POLICY_SUMS``, ``KL_SUMS`` or ``VALUE_SUMS``;
the caller adds them up and divides by ``num_tokens``. The names are TRL's, which averages the means
of microbatches.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from puzzle_align.algos.advantages import MAX_LOG_RATIO, KLEstimator, kl_estimates

POLICY_SUMS = (
    "loss/policy_avg",
    "policy/approxkl_avg",  # (log r)^2 / 2
    "policy/clipfrac_avg",  # tokens whose ratio a clip changes, not the clamp of log r
    "val/ratio",
    "clip_ratio/low_mean",  # with negative A and a ratio below the range
    "clip_ratio/high_mean",  # with positive A and a ratio above it
)
KL_SUMS = ("kl",)
VALUE_SUMS = ("loss/value_avg", "val/clipfrac_avg")
_MAX_LOG_SEQUENCE_RATIO = 10.0  # verl's bound (compute_policy_loss_gspo)


@dataclass(frozen=True)
class LossCounts:
    """Sizes of a mini-batch over all microbatches and ranks, without masked responses."""

    tokens: int
    responses: int
    longest: int  # most tokens that a response may have


def token_weights(mode: str, lengths: torch.Tensor, counts: LossCounts) -> torch.Tensor:
    """Weights of tokens in a loss: float64 [N]; over a mini-batch, the mean that ``mode`` names.

    The modes are verl's ``loss_agg_mode``. ``seq-mean-token-sum-norm`` is the fixed length of Dr.
    GRPO: the sums of responses over the greatest length, and as in TRL their mean.

    Args:
        lengths: tokens of each token's response, [N].
    """
    lengths = lengths.double()
    if mode == "token-mean":
        return torch.full_like(lengths, 1 / max(1, counts.tokens))
    of_response = 1 / max(1, counts.responses)
    if mode == "seq-mean-token-mean":
        return of_response / lengths
    longest = counts.longest if mode == "seq-mean-token-sum-norm" else 1
    return torch.full_like(lengths, of_response / longest)


def sampling_corrections(
    logps: torch.Tensor, sampled: torch.Tensor, mask: torch.Tensor, *, mode: str, cap: float
) -> torch.Tensor:
    """Weights that correct for sampling from another policy than the one trained: float64 [B, T].

    Truncated importance sampling (Ionides, 2008), as in TRL: the ratio of the token's
    probabilities under the trainer and the sampler, or (``sequence_``) of the whole response's;
    above ``cap`` it is ``cap`` (``_truncate``) or 0 (``_mask``). Beyond the mask it is 1.

    Args:
        logps: of the tokens under the actor as it trains, [B, T].
        sampled: under the actor as it sampled, [B, T].
        mask: bool [B, T].
    """
    log_ratios = (logps.double() - sampled.double()).masked_fill(~mask, 0.0)
    if mode.startswith("sequence"):
        log_ratios = log_ratios.sum(dim=1, keepdim=True).expand_as(log_ratios)
    ratios = log_ratios.exp()
    if mode.endswith("truncate"):
        ratios = ratios.clamp(max=cap)
    else:
        ratios = ratios.masked_fill(ratios > cap, 0.0)
    return ratios.masked_fill(~mask, 1.0)


def policy_loss(
    logps: torch.Tensor,
    old_logps: torch.Tensor,
    advantages: torch.Tensor,
    *,
    clip_ratio_low: float,
    clip_ratio_high: float,
    clip_ratio_c: float | None,
    num_tokens: int,
    weights: torch.Tensor | None = None,
    corrections: torch.Tensor | None = None,
    mode: str = "vanilla",
    sequence_means: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The clipped surrogate's share of the loss, a scalar, and ``POLICY_SUMS``, detached [6].

    Schulman et al. (2017), equation 7, negated: ``max(-r A, -clip(r, 1 - low, 1 + high) A)`` with
    ``r = exp(logps - old_logps)``. For negative A it has no upper bound; the dual clip of Ye et al.
    (2020, arXiv 1912.09729) adds the bound ``-c A``. As in verl, ``log r`` is clamped to [-20, 20],
    and tokens beyond have no gradient.

    Other modes, as in verl (``clip_ratio_c`` has no part in them):
    - ``gspo`` (Zheng et al., 2025, arXiv 2507.18071): r is the response's, the geometric mean of
      its tokens' ratios, with the token's gradient; its logarithm is at most 10;
    - ``cispo`` (MiniMax, 2025, arXiv 2506.13585): ``-clip(r) A log p`` with a constant ``clip(r)``:
      a clip bounds the gradient, and no token loses it.

    Args:
        logps: log-probabilities of the tokens under the actor, [N], differentiable.
        old_logps, advantages: under the actor that the responses were sampled from, [N]; A, [N].
        clip_ratio_low, clip_ratio_high: distances of the bounds from 1, at least 0; low at most 1.
        clip_ratio_c: the dual clip's c, above 1; None: no dual clip.
        num_tokens: of the whole mini-batch, without masked responses.
        weights: of the tokens in the loss, [N], 0 if masked; None: ``1 / num_tokens``.
        corrections: further factors of the tokens' losses, [N] (``sampling_corrections``).
        sequence_means: the mean of values [N] over each token's response, [N]; for ``gspo``.
    """
    logps, advantages = logps.double(), advantages.double()
    differences = logps - old_logps.double()
    log_ratios = token_log_ratios = _clamped(differences)
    if mode == "gspo":
        assert sequence_means is not None, "the mode compares sequences"
        means = sequence_means(differences.detach())
        log_ratios = (logps - logps.detach() + means).clamp(max=_MAX_LOG_SEQUENCE_RATIO)
    ratios = log_ratios.exp()
    bounded = ratios.clamp(1 - clip_ratio_low, 1 + clip_ratio_high)
    is_low = (ratios < 1 - clip_ratio_low) & (advantages < 0)
    is_high = (ratios > 1 + clip_ratio_high) & (advantages > 0)
    if mode == "cispo":
        losses, is_clipped = -advantages * bounded.detach() * logps, bounded != ratios
    else:
        losses = torch.maximum(-advantages * ratios, -advantages * bounded)
        is_clipped = is_low | is_high
        if clip_ratio_c is not None and mode == "vanilla":
            losses, is_beyond = _dual_clipped(losses, advantages, clip_ratio_c)
            is_clipped = is_clipped | is_beyond
    share = _share(losses if corrections is None else losses * corrections, num_tokens, weights)
    clips, lows, highs = (each.double() for each in (is_clipped, is_low, is_high))
    parts = torch.stack([token_log_ratios**2 / 2, clips, ratios, lows, highs])
    return share, torch.cat([(share.detach() * num_tokens)[None], token_sums(parts, weights)])


def _clamped(log_ratios: torch.Tensor) -> torch.Tensor:
    return log_ratios.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def _dual_clipped(
    losses: torch.Tensor, advantages: torch.Tensor, clip_ratio_c: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Losses [N] of at most ``-c A`` where A is negative, and whether they were over it."""
    most = torch.where(advantages < 0, -advantages * clip_ratio_c, torch.inf)
    return torch.minimum(losses, most), losses > most


def token_sums(values: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
    """Sums of the values [..., N] over the tokens that are in the loss, detached [...]."""
    values = values.detach()
    return (values if weights is None else values * (weights > 0)).sum(dim=-1)


def _share(losses: torch.Tensor, num_tokens: int, weights: torch.Tensor | None) -> torch.Tensor:
    return losses.sum() / num_tokens if weights is None else (losses * weights).sum()


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


def entropy_bonus(
    entropies: torch.Tensor,
    *,
    coefficient: float,
    num_tokens: int,
    weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """The entropy bonus's share of the loss, a scalar: ``-coefficient`` times the mean entropy.

    Schulman et al. (2017), equation 9.

    Args:
        entropies: of the actor's distribution at each token, [N], in nats.
        coefficient: loss a nat.
        num_tokens, weights: as for ``policy_loss``.
    """
    return -coefficient * _share(entropies.double(), num_tokens, weights)


def kl_loss(
    logps: torch.Tensor,
    ref_logps: torch.Tensor,
    *,
    estimator: KLEstimator,
    coefficient: float,
    num_tokens: int,
    weights: torch.Tensor | None = None,
    old_logps: torch.Tensor | None = None,
    sequence_means: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The KL's share of the loss, a scalar, and ``KL_SUMS``, detached [1].

    The loss is ``coefficient`` times the mean KL to the reference, ``kl`` the mean over tokens.
    As a loss k1 has a gradient of mean 0 (``kl_estimates``): choose k2 or k3.

    With ``old_logps`` the KL of a token is multiplied by its probability ratio, which is
    differentiated, too: the mean gradient of k3 is then that of the KL (DeepSeek-V3.2, 2025, arXiv
    2512.02556). With ``sequence_means``, as in TRL, it is the response's ratio.

    Args:
        logps: log-probabilities of the tokens under the actor, [N], differentiable.
        ref_logps: under the reference, [N].
        coefficient: loss a nat.
        num_tokens, weights, old_logps, sequence_means: as for ``policy_loss``.
    """
    kls = kl_estimates(logps, ref_logps, estimator)
    if old_logps is not None:
        log_ratios = logps.double() - old_logps.double()
        if sequence_means is not None:
            log_ratios = sequence_means(log_ratios)
        kls = kls * _clamped(log_ratios).exp()
    return coefficient * _share(kls, num_tokens, weights), token_sums(kls[None], weights)
