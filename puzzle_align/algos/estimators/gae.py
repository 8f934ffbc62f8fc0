"""Generalized advantage estimation, from a critic's values."""

import torch

from puzzle_align.algos.estimators import Estimate, Samples


def estimate(samples: Samples) -> Estimate:
    """Estimate advantages and the critic's targets by ``gae``."""
    assert samples.values is not None and samples.final_values is not None, "there is no critic"
    return gae(
        samples.rewards,
        samples.values,
        samples.final_values,
        samples.ended,
        samples.mask,
        gamma=samples.gamma,
        lam=samples.lam,
    )


def gae(
    rewards: torch.Tensor,
    values: torch.Tensor,
    final_values: torch.Tensor,
    terminated: torch.Tensor,
    mask: torch.Tensor,
    *,
    gamma: float,
    lam: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Advantages and the critic's targets (advantage plus value): ``(float64 [B, T], same)``.

    Schulman et al. (2016), equation 16: ``A_t = sum over l of (gamma lam)^l delta_{t+l}`` with
    ``delta_t = r_t + gamma V_{t+1} - V_t``, to the end of the response. After its last token V is 0
    if the response terminated, and ``final_values`` if it was truncated, since it would have gone
    on and earned more. This bootstrap is right if truncated responses get no score, or with
    ``gamma`` < 1: else the critic, trained on these targets, adds one score to another and its
    values grow without bound.

    Args:
        rewards: of the tokens, [B, T].
        values: of the states before the tokens, [B, T].
        final_values: of the states after the last tokens, [B]; not read where terminated.
        terminated: bool [B], whether the response ends with a stop token.
        mask: bool [B, T].
        gamma: discount a token, in [0, 1].
        lam: weight of the longer estimates, in [0, 1]: 0 gives ``delta_t`` (equation 17), 1 the
            discounted rewards less ``V_t`` (equation 18).
    """
    rewards, values = rewards.double(), values.double()
    next_values = final_values.double().masked_fill(terminated, 0.0)
    advantage = torch.zeros_like(next_values)
    advantages = torch.zeros_like(rewards)
    for t in reversed(range(rewards.shape[1])):
        is_token = mask[:, t]
        delta = rewards[:, t] + gamma * next_values - values[:, t]
        advantage = torch.where(is_token, delta + gamma * lam * advantage, advantage)
        next_values = torch.where(is_token, values[:, t], next_values)
        advantages[:, t] = advantage.masked_fill(~is_token, 0.0)
    return advantages, advantages + values.masked_fill(~mask, 0.0)
