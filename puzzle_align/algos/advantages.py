"""Token rewards and advantages of sampled responses, from their scores and log-probabilities.

Shapes: B responses, T tokens of the longest one. A ``mask`` bool [B, T] is true at a response's
tokens; other elements are ignored, even NaN, and results are 0 there. Results are float64: the
differences of neighbouring values in advantages lose digits.

``values[b, t]`` is the value of the prompt and the tokens before t, the critic's output where token
t is predicted; the value of the state after the last token is the critic's output at that token.

None of these functions reduces over ranks: statistics of all responses are arguments, as sums that
the caller adds over ranks.
"""

from typing import Literal

import torch

KLEstimator = Literal["k1", "k2", "k3"]

# Added to a variance before dividing by its root, as in TRL.
_VARIANCE_FLOOR = 1e-8
# verl's bounds (core_algos.py, compute_policy_loss and kl_penalty_forward): of log-ratios before
# they are exponentiated, and of k3, which would be 1e13 at a log-ratio of 30.
MAX_LOG_RATIO = 20.0
_MAX_K3 = 10.0
# Ziegler et al.'s bound of the relative error that moves the coefficient.
_MAX_KL_ERROR = 0.2


def kl_estimates(
    logps: torch.Tensor,
    ref_logps: torch.Tensor,
    estimator: KLEstimator,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """KL(policy || reference) estimated at every token, in nats: float64, differentiable.

    Schulman, "Approximating KL Divergence" (2020), with ``r`` the reference's probability of the
    token over the policy's: ``k1 = -log r``, ``k2 = (log r)^2 / 2``, ``k3 = r - 1 - log r``. For
    tokens sampled from the policy the mean of k1 and of k3 is the KL; k2 is biased, by little if
    the two models are close. k2 and k3 are never negative.

    As losses they differ: the mean gradient of k1 is 0, that of k2 is the gradient of the KL, and
    that of k3 is the gradient of the reverse KL, KL(reference || policy).

    As in verl, k3 clamps ``log r`` to [-20, 20] and its result to at most 10, which it reaches at
    ``log r`` of 2.6 and -11; a token beyond has no gradient. k1 and k2 are not bounded.

    Args:
        logps: the policy's log-probabilities of the tokens, any shape.
        ref_logps: the reference's, of that shape.
        mask: bool, of that shape; None: every element is a token.
    """
    log_ratios = ref_logps.double() - logps.double()
    if mask is not None:
        # Masked before the estimator: the gradient of an infinite input would be NaN.
        log_ratios = log_ratios.masked_fill(~mask, 0.0)
    if estimator == "k1":
        return -log_ratios
    if estimator == "k2":
        return log_ratios**2 / 2
    log_ratios = log_ratios.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return (torch.expm1(log_ratios) - log_ratios).clamp(max=_MAX_K3)


def next_kl_coef(
    kl_coef: float, kl: float, num_responses: int, *, target: float | None, horizon: int
) -> float:
    """The coefficient of the KL penalty after ``num_responses`` more responses.

    Ziegler et al. (2019), section 2.2: it is multiplied by ``1 + K e`` with the error
    ``e = clip(kl / target - 1, -0.2, 0.2)`` and, as in TRL, ``K = num_responses / horizon``.

    Args:
        kl_coef: the current coefficient.
        kl: mean KL of these responses, in nats a response (the sum over its tokens).
        num_responses: sampled with this coefficient, over all ranks; below five horizons, or the
            coefficient might not stay positive.
        target: desired ``kl``; None: the coefficient is fixed.
        horizon: in responses; a longer one changes the coefficient more slowly.
    """
    if target is None:
        return kl_coef
    error = min(max(kl / target - 1, -_MAX_KL_ERROR), _MAX_KL_ERROR)
    return kl_coef * (1 + error * num_responses / horizon)


def response_scores(
    scores: torch.Tensor,
    terminated: torch.Tensor,
    *,
    clip: float | None,
    missing_eos_penalty: float,
) -> torch.Tensor:
    """Scores of responses after clipping and penalty, float64 [B].

    Args:
        scores: from the reward model or function, [B].
        terminated: bool [B], whether the response ends with a stop token.
        clip: scores are clipped to [-clip, clip]; None: no clipping.
        missing_eos_penalty: subtracted from the score of a response without a stop token, after
            the clipping, which would else undo it for the worst responses.
    """
    scores = scores.double()
    if clip is not None:
        scores = scores.clamp(-clip, clip)
    return scores - missing_eos_penalty * (~terminated).double()


def token_rewards(
    scores: torch.Tensor, kls: torch.Tensor, mask: torch.Tensor, *, kl_coef: float
) -> torch.Tensor:
    """Rewards of tokens, float64 [B, T]: ``-kl_coef * kl``, plus the score at the last token.

    A response without tokens has no rewards. If the KL is in the loss, ``kl_coef`` is 0 here.

    Args:
        scores: of the responses, [B].
        kls: of the tokens, [B, T], in nats.
        mask: bool [B, T].
        kl_coef: score units a nat.
    """
    num_after = mask.flip(1).cumsum(1).flip(1)  # tokens from here to the end, this one included
    rewards = torch.where(mask & (num_after == 1), scores.double()[:, None], 0.0)
    if kl_coef:
        rewards = rewards - kl_coef * kls.double().masked_fill(~mask, 0.0)
    return rewards


def moment_sums(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """``(count, sum)`` of the values (any shape) under the mask: float64 [2], to add over ranks."""
    return torch.stack([mask.sum().double(), values.double().masked_fill(~mask, 0.0).sum()])


def deviation_sums(values: torch.Tensor, mask: torch.Tensor, sums: torch.Tensor) -> torch.Tensor:
    """Sums of the values' deviations from their mean, and of the squares: float64 [2].

    They are to be added over ranks. The first sum is the mean's rounding error, so not quite 0.

    Args:
        values: any shape.
        mask: bool, of that shape.
        sums: ``moment_sums`` of all ranks' values, added: float64 [2].
    """
    deviations = (values.double() - _mean(sums)).masked_fill(~mask, 0.0)
    return torch.stack([deviations.sum(), (deviations**2).sum()])


def unbiased_variance(sums: torch.Tensor, deviations: torch.Tensor) -> torch.Tensor:
    """The values' variance, a float64 scalar; that of a single value is 0.

    It is computed by the corrected two-pass algorithm (Chan, Golub and LeVeque, 1983): with a mean
    far from 0, the difference of the mean square and the squared mean would lose digits.

    Args:
        sums: ``moment_sums`` of all ranks' values, added: float64 [2].
        deviations: ``deviation_sums`` of all ranks' values, added: float64 [2].
    """
    count, (excess, squares) = sums[0], deviations.unbind()
    rest = excess / count.clamp(min=1)
    return ((squares - excess * rest) / (count - 1).clamp(min=1)).clamp(min=0)


def whiten(
    values: torch.Tensor,
    mask: torch.Tensor,
    sums: torch.Tensor,
    deviations: torch.Tensor,
    *,
    shift_mean: bool,
) -> torch.Tensor:
    """``(x - mean) / sqrt(variance + 1e-8)``, float64, in the shape of ``values``.

    The variance is the unbiased one, as in TRL.

    Args:
        values: any shape.
        mask: bool, of that shape.
        sums, deviations: as for ``unbiased_variance``.
        shift_mean: whether the mean becomes 0 (advantages) or is kept (rewards, whose sign has a
            meaning).
    """
    mean, rest = _mean(sums), deviations[0] / sums[0].clamp(min=1)
    variance = unbiased_variance(sums, deviations)
    whitened = (values.double() - mean - rest) * torch.rsqrt(variance + _VARIANCE_FLOOR)
    if not shift_mean:
        whitened = whitened + (mean + rest)
    return whitened.masked_fill(~mask, 0.0)


def _mean(sums: torch.Tensor) -> torch.Tensor:
    """Mean from ``moment_sums``; 0 if there are no values."""
    return sums[1] / sums[0].clamp(min=1)
