"""Token rewards and advantages of sampled responses, from their scores and log-probabilities.

Shapes: B responses, T tokens of the longest one. A ``mask`` bool [B, T] is true at a response's
tokens; other elements of tensors are never read, NaN included, and results are 0 there. Results
are float64: the differences of neighbouring values that advantages are made of lose digits.

States and values follow the tokens: ``values[b, t]`` is of the prompt and the tokens before t,
which is the critic's output where token t is predicted; the state after the last token has a
value of its own, the critic's output at that token.

None of these functions reduces over ranks: numbers that depend on other responses come in as sums
that ranks can add.
"""

from typing import Literal

import torch

KLEstimator = Literal["k1", "k2", "k3"]

# Added to a variance before dividing by its root, as in TRL.
_VARIANCE_FLOOR = 1e-8
# verl's bounds (core_algos.py, compute_policy_loss and kl_penalty_forward): of log-ratios that are
# exponents, and of k3, which would be 1e13 at a log-ratio of 30.
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
    tokens sampled from the policy k1 and k3 have the KL as their mean; k2 is biased, little where
    the two are close. k2 and k3 are never negative.

    As a loss they differ: the gradient of k1 has mean 0, that of k2 has the KL's gradient as its
    mean, and that of k3 the gradient of the KL the other way around.

    As in verl, ``log r`` counts in k3 as at most 20, and k3 as at most 10: it is 10 at ``log r`` of
    2.6 and of -11. A token beyond has no gradient. k1 and k2 are not bounded.

    Args:
        logps: the policy's log-probabilities of the tokens, any shape.
        ref_logps: the reference's, of that shape.
        estimator: its name.
        mask: bool, of that shape; None: every element is a token.
    """
    log_ratios = ref_logps.double() - logps.double()
    if mask is not None:
        # Before the estimator, not after: its gradient would be NaN where its input is infinite.
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

    Ziegler et al. (2019), section 2.2: times ``1 + K e`` with the error
    ``e = clip(kl / target - 1, -0.2, 0.2)`` and, as TRL has it, ``K = num_responses / horizon``.

    Args:
        kl_coef: the coefficient now.
        kl: nats a response (the sum over its tokens), the mean over these responses.
        num_responses: sampled with this coefficient, over all ranks; below five horizons, since
            the coefficient would not stay positive.
        target: nats a response that ``kl`` is steered to; None: the coefficient is fixed.
        horizon: in responses; the longer, the slower the coefficient moves.
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
        clip: scores are clipped to at most this far from 0; None: they are not.
        missing_eos_penalty: taken off the score of a response without a stop token, after the
            clipping, which would else take it away from the worst responses.
    """
    scores = scores.double()
    if clip is not None:
        scores = scores.clamp(-clip, clip)
    return scores - missing_eos_penalty * (~terminated).double()


def token_rewards(
    scores: torch.Tensor, kls: torch.Tensor, mask: torch.Tensor, *, kl_coef: float
) -> torch.Tensor:
    """``-kl_coef * kl`` at every token, and the score more at a response's last: float64 [B, T].

    A response without tokens has no rewards. With the KL in the loss, ``kl_coef`` is 0 here.

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
    """``(count, sum)`` of the values under the mask: float64 [2]; ranks add theirs.

    Args:
        values: any shape.
        mask: bool, of that shape.
    """
    return torch.stack([mask.sum().double(), values.double().masked_fill(~mask, 0.0).sum()])


def deviation_sums(values: torch.Tensor, mask: torch.Tensor, sums: torch.Tensor) -> torch.Tensor:
    """Sums of the values' distances from their mean, and of their squares: float64 [2].

    Ranks add theirs. The first sum is the rounding error of the mean, and so not quite 0.

    Args:
        values: any shape.
        mask: bool, of that shape.
        sums: ``moment_sums`` of all ranks' values, added: float64 [2].
    """
    deviations = (values.double() - _mean(sums)).masked_fill(~mask, 0.0)
    return torch.stack([deviations.sum(), (deviations**2).sum()])


def whiten(
    values: torch.Tensor,
    mask: torch.Tensor,
    sums: torch.Tensor,
    deviations: torch.Tensor,
    *,
    shift_mean: bool,
) -> torch.Tensor:
    """``(x - mean) / sqrt(variance + 1e-8)``, float64, in the shape of ``values``.

    The variance is the unbiased one, as TRL has it; a single value has variance 0. It is that of
    the corrected two-pass algorithm (Chan, Golub and LeVeque, 1983): the difference of the mean
    square and the squared mean would lose the digits that a mean far from 0 takes.

    Args:
        values: any shape.
        mask: bool, of that shape.
        sums: ``moment_sums`` of all ranks' values, added: float64 [2].
        deviations: ``deviation_sums`` of all ranks' values, added: float64 [2].
        shift_mean: whether the mean becomes 0 (advantages) or is added again (rewards, whose
            sign says something).
    """
    count, (excess, squares) = sums[0], deviations.unbind()
    mean, rest = _mean(sums), excess / count.clamp(min=1)
    variance = ((squares - excess * rest) / (count - 1).clamp(min=1)).clamp(min=0)
    whitened = (values.double() - mean - rest) * torch.rsqrt(variance + _VARIANCE_FLOOR)
    if not shift_mean:
        whitened = whitened + (mean + rest)
    return whitened.masked_fill(~mask, 0.0)


def _mean(sums: torch.Tensor) -> torch.Tensor:
    """Mean from ``moment_sums``; 0 of no values."""
    return sums[1] / sums[0].clamp(min=1)
