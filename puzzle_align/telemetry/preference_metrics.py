"""Preference metrics under TRL's names: a row of values for each pair, and their means.

Invariants (the tests assert them):
- every pair gives one row on one rank, so a table of a global batch's pairs summed over ranks gives
  the metrics of that batch, for any plan and packing;
- the denominator is the number of pairs, never the number of microbatches or ranks;
- accuracy counts a pair as 1 if the chosen reward is higher, and as 1/2 if the rewards are equal,
  so that a policy equal to its reference has accuracy 1/2 (in TRL: 0);
- token metrics are means over the batch's tokens (in TRL, a microbatch's): ``entropy`` over both
  responses, ``logits/*`` (mean over the vocabulary) over one of them, ``mean_token_accuracy`` over
  the chosen one. TRL's ORPO and CPO have only ``logits/*``, over prompts and padding too.

A reward model's metrics have the names of TRL's RewardTrainer; minimum and maximum reward are over
the global batch. Metrics of unpaired data have the names of KTOTrainer, from a row for each
response: desirable ones are ``chosen``, others ``rejected``. Each mean is over one kind, and left
out if a batch has none of it.

Shapes: n pairs or responses; C columns: for pairs NAMES, then ``token_values`` if tokens have
statistics.
"""

import torch
from torch import Tensor

NAMES = (
    "loss",
    "rewards/chosen",
    "rewards/rejected",
    "rewards/accuracies",
    "rewards/margins",
    "logps/chosen",
    "logps/rejected",
)
TOKEN_NAMES = ("entropy", "logits/chosen", "logits/rejected", "mean_token_accuracy")
_NUM_TOKEN_VALUES = len(TOKEN_NAMES) + 2
REWARD_COLUMNS = ("loss", "chosen", "rejected")
RESPONSE_COLUMNS = ("loss", "label", "kl", "reward", "logp")
RESPONSE_TOKEN_COLUMNS = ("entropy", "logits", "length")  # if tokens have statistics: sums of them


def rows(*columns: Tensor) -> Tensor:
    """Rows of values, float64 [n, C], detached, from their columns, [n] each."""
    return torch.stack([column.detach().double() for column in columns], dim=1)


def num_values(statistics: bool) -> int:
    """Number of values in a pair's row, C."""
    return len(NAMES) + (_NUM_TOKEN_VALUES if statistics else 0)


def num_response_values(statistics: bool) -> int:
    """Number of values in a response's row, C."""
    return len(RESPONSE_COLUMNS) + (len(RESPONSE_TOKEN_COLUMNS) if statistics else 0)


def pair_values(
    losses: Tensor,
    chosen_rewards: Tensor,
    rejected_rewards: Tensor,
    chosen_logps: Tensor,
    rejected_logps: Tensor,
) -> Tensor:
    """Rows of pairs, float64 [n, C] in the order of ``NAMES``, detached. All arguments are [n]."""
    chosen, rejected = chosen_rewards.double(), rejected_rewards.double()
    correct, margins = accuracy(chosen, rejected), chosen - rejected
    return rows(losses, chosen, rejected, correct, margins, chosen_logps, rejected_logps)


def token_values(entropy: Tensor, mean_logit: Tensor, is_top1: Tensor, lengths: Tensor) -> Tensor:
    """Columns after ``pair_values`` in a row, float64 [n, 6]: sums over tokens, and lengths.

    All arguments are [n, 2], chosen first: statistics summed over a response, and its length.
    """
    return rows(entropy.sum(1), *mean_logit.unbind(1), is_top1[:, 0], *lengths.unbind(1))


def summarize(values: Tensor) -> dict[str, float]:
    """Metrics by name from ``values`` float64 [n, C], n > 0."""
    assert len(values) > 0
    metrics: dict[str, float] = dict(
        zip(NAMES, values[:, : len(NAMES)].mean(dim=0).tolist(), strict=True)
    )
    if values.size(1) > len(NAMES):
        *sums, chosen, rejected = values[:, len(NAMES) :].sum(dim=0).tolist()
        counts = (chosen + rejected, chosen, rejected, chosen)
        means = (total / count for total, count in zip(sums, counts, strict=True))
        metrics |= dict(zip(TOKEN_NAMES, means, strict=True))
    return metrics


def accuracy(chosen: Tensor, rejected: Tensor) -> Tensor:
    """1 where the chosen reward is higher, 0 where lower, 1/2 where equal; float64 [n]."""
    return 0.5 * ((chosen > rejected).double() + (chosen >= rejected).double())


def summarize_rewards(values: Tensor) -> dict[str, float]:
    """Metrics by name from rows of ``REWARD_COLUMNS``, float64 [n, C], n > 0.

    ``min_reward``, ``mean_reward`` and ``max_reward`` are over both responses of all pairs.
    """
    losses, chosen, rejected = values.unbind(dim=1)
    rewards = values[:, 1:]
    metrics = {
        "loss": losses.mean(),
        "accuracy": accuracy(chosen, rejected).mean(),
        "margin": (chosen - rejected).mean(),
        "min_reward": rewards.min(),
        "mean_reward": rewards.mean(),
        "max_reward": rewards.max(),
    }
    return {name: value.item() for name, value in metrics.items()}


def summarize_responses(values: Tensor) -> dict[str, float]:
    """Metrics by name from rows of ``RESPONSE_COLUMNS``, float64 [n, C], n > 0."""
    columns = dict(
        zip(RESPONSE_COLUMNS + RESPONSE_TOKEN_COLUMNS, values.unbind(dim=1), strict=False)
    )
    kinds = {"chosen": columns["label"] > 0, "rejected": columns["label"] <= 0}
    metrics = {name: columns[name].mean().item() for name in ("loss", "kl")}
    for kind, is_kind in kinds.items():
        if is_kind.any():
            metrics[f"rewards/{kind}"] = columns["reward"][is_kind].mean().item()
            metrics[f"logps/{kind}"] = columns["logp"][is_kind].mean().item()
    if all(is_kind.any() for is_kind in kinds.values()):
        metrics["rewards/margins"] = metrics["rewards/chosen"] - metrics["rewards/rejected"]
    if "length" in columns:
        lengths = columns["length"]
        metrics["entropy"] = (columns["entropy"].sum() / lengths.sum()).item()
        for kind, is_kind in kinds.items():
            if is_kind.any():
                mean = columns["logits"][is_kind].sum() / lengths[is_kind].sum()
                metrics[f"logits/{kind}"] = mean.item()
    return metrics
