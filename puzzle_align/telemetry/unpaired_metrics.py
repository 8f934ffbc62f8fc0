"""Metrics of unpaired preference data under the names of TRL's KTOTrainer.

A line of values a response, put together from all ranks as in ``preference_metrics``. ``chosen``
are the desirable responses, ``rejected`` the others: means are over one kind, and are left out
where a batch has none of it. ``entropy`` and ``logits/*`` are means over tokens.

Shapes: n responses, C = ``num_values`` columns.
"""

import torch
from torch import Tensor

_COLUMNS = ("loss", "label", "kl", "reward", "logp")
_TOKEN_COLUMNS = ("entropy", "logits", "length")


def num_values(statistics: bool) -> int:
    """C."""
    return len(_COLUMNS) + (len(_TOKEN_COLUMNS) if statistics else 0)


def response_values(
    losses: Tensor, labels: Tensor, kl: float, rewards: Tensor, logps: Tensor
) -> Tensor:
    """A line for every response, float64 [n, 5], detached. All tensors are [n]."""
    columns = losses, labels, torch.full_like(labels, kl), rewards, logps
    return torch.stack([column.detach().double() for column in columns], dim=1)


def token_values(entropy: Tensor, mean_logit: Tensor, lengths: Tensor) -> Tensor:
    """Statistics summed over a response's tokens, and their number: float64 [n, 3]; all are [n]."""
    columns = entropy, mean_logit, lengths
    return torch.stack([column.detach().double() for column in columns], dim=1)


def summarize(values: Tensor) -> dict[str, float]:
    """Metrics by name from ``values`` float64 [n, C], n > 0."""
    columns = dict(zip(_COLUMNS + _TOKEN_COLUMNS, values.unbind(dim=1), strict=False))
    kinds = {"chosen": columns["label"] > 0, "rejected": columns["label"] <= 0}
    found = {name: columns[name].mean().item() for name in ("loss", "kl")}
    for kind, own in kinds.items():
        if own.any():
            found[f"rewards/{kind}"] = columns["reward"][own].mean().item()
            found[f"logps/{kind}"] = columns["logp"][own].mean().item()
    if all(own.any() for own in kinds.values()):
        found["rewards/margins"] = found["rewards/chosen"] - found["rewards/rejected"]
    if "length" in columns:
        lengths = columns["length"]
        found["entropy"] = (columns["entropy"].sum() / lengths.sum()).item()
        for kind, own in kinds.items():
            if own.any():
                mean = columns["logits"][own].sum() / lengths[own].sum()
                found[f"logits/{kind}"] = mean.item()
    return found
