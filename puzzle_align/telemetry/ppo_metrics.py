"""PPO metrics under TRL's names, of an iteration's responses and updates.

Sums are added over ranks, so that metrics are over all responses for any plan and packing (TRL
takes means of processes' means).

Other differences from TRL: ``val/num_eos_tokens`` covers all processes and counts responses that
end with any stop token; ``val/ratio_var`` is over updates, not over their microbatches. TRL's
GRPOTrainer has ``reward_std``, ``frac_reward_zero_std``, and names under ``completions/`` and
``rewards/``, except ``num_empty`` and ``num_unscored``.

Shapes: n responses of a rank, N of all ranks, T tokens of the longest, C = len(SUMS), F reward
functions. A mask (bool [n, T]) is true at a response's tokens.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

SUMS = (
    "responses",
    "scored",
    "scores",
    "squared scores",
    "rewards",
    "kl",
    "negative log-probabilities",
    "tokens",
    "stopped",
    "empty",
    "groups",
    "equal groups",
    "valued",
    "returns",
    "squared returns",
    "errors",
    "squared errors",
)


def rollout_sums(
    *,
    scores: Tensor,
    rewards: Tensor,
    kls: Tensor,
    logps: Tensor,
    stopped: Tensor,
    mask: Tensor,
    prompts: Tensor,
    values: Tensor | None = None,
    returns: Tensor | None = None,
) -> Tensor:
    """Sums over this rank's responses, in the order of ``SUMS``: float64 [C]; add them over ranks.

    Args:
        scores: [n], clipped and less the missing-EOS penalty, as included in ``rewards``; NaN if a
            response has no score.
        rewards: of tokens, before whitening: [n, T].
        kls: of tokens, in nats: [n, T].
        logps: of tokens under the policy that sampled them: [n, T].
        stopped: whether a response ends with a stop token: bool [n].
        mask: bool [n, T].
        prompts: int64 [n], the prompt of each; all responses to one are here.
        values, returns: of tokens, the critic's and what it learns: [n, T]; None without a critic.
    """
    scored, lengths = ~scores.isnan(), mask.sum(dim=1)
    scores = scores.double().masked_fill(~scored, 0.0)
    per_response = (
        torch.ones_like(scores),
        scored,
        scores,
        scores**2,
        _over_tokens(rewards, mask).masked_fill(~scored, 0.0),
        _over_tokens(kls, mask),
        -_over_tokens(logps, mask),
        lengths,
        stopped,
        lengths - stopped.long() <= 0,
    )
    sums = torch.stack([each.double().sum() for each in per_response])
    of_values = _value_sums(values, returns, mask & scored[:, None])
    return torch.cat([sums, _group_sums(scores, scored, prompts), of_values]).detach()


def _value_sums(values: Tensor | None, returns: Tensor | None, mask: Tensor) -> Tensor:
    """Tokens with a value, and sums of returns and of returns less values, and of squares: [5]."""
    if values is None or returns is None:
        return torch.zeros(5, dtype=torch.float64)
    targets, errors = returns.double()[mask], (returns.double() - values.double())[mask]
    sums = [total for each in (targets, errors) for total in (each.sum(), (each**2).sum())]
    return torch.stack([mask.sum().double(), *sums])


def _group_sums(scores: Tensor, scored: Tensor, prompts: Tensor) -> Tensor:
    """Groups of two scored responses or more, and those whose scores are equal: [2]."""
    _, group = prompts.unique(return_inverse=True)
    zeros = torch.zeros(int(group.max()) + 1 if len(group) else 0, dtype=torch.float64)
    number = zeros.index_add(0, group, scored.double())
    mean = zeros.index_add(0, group, scores) / number.clamp(min=1)
    squares = ((scores - mean[group]) ** 2).masked_fill(~scored, 0.0)
    deviations = (zeros.index_add(0, group, squares) / (number - 1).clamp(min=1)).sqrt()
    compares = number > 1
    is_equal = compares & torch.isclose(deviations, torch.zeros_like(deviations))
    return torch.stack([compares.sum(), is_equal.sum()]).double()


def rollout_metrics(sums: Tensor) -> dict[str, float]:
    """Metrics by name from ``rollout_sums`` added over all ranks, float64 [C]; needs a response.

    - ``objective/kl``, ``objective/entropy``: sum over a response's tokens (of minus the
      log-probability, for entropy), mean over responses.
    - ``objective/scores``, ``reward_std`` (the scores' standard deviation, unbiased),
      ``objective/non_score_reward`` (the KL's part of the rewards) and ``objective/rlhf_reward``
      (scores plus KL): over the responses with a score; NaN if there are none.
    - ``completions/num_empty``: responses without a token besides a stop token.
    - ``completions/num_unscored``: responses without a score; left out if 0.
    - ``frac_reward_zero_std``: prompts whose scores are all equal; left out if no prompt has two
      scored responses.
    - ``val/explained_var``: 1 less the variance of returns less values over that of returns, of all
      tokens of scored responses; left out without a critic, or if all returns are equal.
    """
    named = dict(zip(SUMS, sums.tolist(), strict=True))
    count = named.pop("responses")
    assert count > 0
    scored = named.pop("scored")
    of_values = _explained_variance(*(named.pop(name) for name in SUMS[-5:]))
    groups, equal = named.pop("groups"), named.pop("equal groups")
    of_groups = {"frac_reward_zero_std": equal / groups} if groups else {}
    of_scored = {name: named.pop(name) for name in ("scores", "squared scores", "rewards")}
    means = {name: total / count for name, total in named.items()}
    means |= {name: total / scored if scored else math.nan for name, total in of_scored.items()}
    spread = max(0.0, of_scored["squared scores"] - scored * means["scores"] ** 2)
    unscored = {"completions/num_unscored": count - scored} if scored < count else {}
    return {
        "objective/scores": means["scores"],
        "reward_std": math.sqrt(spread / max(1.0, scored - 1)) if scored else math.nan,
        "objective/kl": means["kl"],
        "objective/entropy": means["negative log-probabilities"],
        "objective/non_score_reward": means["rewards"] - means["scores"],
        "objective/rlhf_reward": means["rewards"],
        "val/num_eos_tokens": named["stopped"],
        "completions/mean_length": means["tokens"],
        "completions/num_empty": named["empty"],
        **unscored,
        **of_groups,
        **of_values,
    }


def _explained_variance(
    count: float, returns: float, squared_returns: float, errors: float, squared_errors: float
) -> dict[str, float]:
    """``val/explained_var`` from sums over tokens, if it is defined."""
    variance = squared_returns - returns**2 / max(1.0, count)
    if variance <= 1e-12 * squared_returns:  # rounding
        return {}
    left = squared_errors - errors**2 / count
    return {"val/explained_var": 1.0 - left / variance}


def length_metrics(lengths: np.ndarray, stopped: np.ndarray) -> dict[str, float]:
    """``completions/*_length`` of all responses, int64 [N], of those that ``stopped``, bool [N].

    As in TRL: the shortest and longest; mean, shortest and longest of the terminated ones (0 if
    there are none); ``completions/clipped_ratio``, the share of the others.
    """
    ended = lengths[stopped] if stopped.any() else np.zeros(1)
    return {
        "completions/min_length": float(lengths.min()),
        "completions/max_length": float(lengths.max()),
        "completions/clipped_ratio": 1.0 - float(stopped.mean()),
        "completions/mean_terminated_length": float(ended.mean()),
        "completions/min_terminated_length": float(ended.min()),
        "completions/max_terminated_length": float(ended.max()),
    }


Spread = tuple[int, float, float, float]  # number of values, their sum, the least, the greatest


def spread_of(values: Tensor) -> Spread:
    """Spread of a rank's values, any shape."""
    if not values.numel():
        return 0, 0.0, math.inf, -math.inf
    return values.numel(), values.sum().item(), values.min().item(), values.max().item()


def sampling_metrics(
    differences: Sequence[Spread], corrections: Sequence[Spread]
) -> dict[str, float]:
    """Distance of the policy that samples from the one that trains, from every rank's spreads.

    - ``sampling/sampling_logp_difference/mean``, ``/max``: of the tokens' log-probabilities,
      absolute, in nats;
    - ``sampling/importance_sampling_ratio/min``, ``/mean``, ``/max``: of the corrections, by token
      or by response as the mode has them; left out without corrections.
    """
    metrics = {}
    for name, parts in (
        ("sampling/sampling_logp_difference", differences),
        ("sampling/importance_sampling_ratio", corrections),
    ):
        count = sum(number for number, *_ in parts)
        if not count:
            continue
        metrics[f"{name}/min"] = min(least for _, _, least, _ in parts)
        metrics[f"{name}/mean"] = sum(total for _, total, _, _ in parts) / count
        metrics[f"{name}/max"] = max(most for _, _, _, most in parts)
    metrics.pop("sampling/sampling_logp_difference/min", None)
    return metrics


def function_metrics(names: Sequence[str], rewards: Tensor) -> dict[str, float]:
    """``rewards/<name>/mean`` and ``/std`` (unbiased; 0 for one response) of each reward function.

    They are over the responses with a reward by this function; NaN if there are none.

    Args:
        names: of the functions, [F].
        rewards: float64 [N, F]; NaN where a function gives none.
    """
    metrics = {}
    for name, values in zip(names, rewards.unbind(dim=1), strict=True):
        applied = values[~values.isnan()]
        metrics[f"rewards/{name}/mean"] = applied.mean().item()
        spread = applied.std() if len(applied) > 1 else applied.mean() * 0.0
        metrics[f"rewards/{name}/std"] = spread.item()
    return metrics


def logged_metrics(by_rank: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, float]:
    """Mean of each named metric that reward functions logged, over all calls on all ranks."""
    names = sorted({name for logged in by_rank for name in logged})
    values = {name: [v for logged in by_rank for v in logged.get(name, ())] for name in names}
    return {name: sum(logged) / len(logged) for name, logged in values.items()}


def update_metrics(updates: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Mean of each metric over those of an iteration's updates that have it.

    Adds ``val/ratio_var``, the unbiased variance of ``val/ratio`` (0 for one update), if present.
    """
    values: dict[str, list[float]] = {}
    for update in updates:
        for name, value in update.items():
            values.setdefault(name, []).append(value)
    means = {name: sum(of_updates) / len(of_updates) for name, of_updates in values.items()}
    if "val/ratio" in means:
        ratios, mean = values["val/ratio"], means["val/ratio"]
        means["val/ratio_var"] = sum((r - mean) ** 2 for r in ratios) / max(1, len(ratios) - 1)
    return means


def _over_tokens(values: Tensor, mask: Tensor) -> Tensor:
    """Sum over each response's tokens, float64 [n]."""
    return values.double().masked_fill(~mask, 0.0).sum(dim=1)
