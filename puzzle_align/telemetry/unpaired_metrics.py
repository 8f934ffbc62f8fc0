"""Metrics of unpaired preference data under the names of TRL's KTOTrainer.

Every response gives a row of values; ranks put them together as in ``preference_metrics``. The
desirable responses are ``chosen``, the others ``rejected``: means are over one kind, and are left
out where a batch has none of it. ``entropy`` and ``logits/*`` are means over tokens.

Shapes: n responses, C = ``num_values`` columns.
"""

import torch
from torch import Tensor

_COLUMNS = ("loss", "label", "kl", "reward", "logp")
_TOKEN_COLUMNS = ("entropy", "logits", "length")


def num_values(statistics: bool) -> int:
    """Number of values in a response's row, C."""
    return len(_COLUMNS) + (len(_TOKEN_COLUMNS) if statistics else 0)


def response_values(
    losses: Tensor, labels: Tensor, kl: float, rewards: Tensor, logps: Tensor
) -> Tensor:
    """Rows of responses, float64 [n, 5], detached. All tensors are [n]."""
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
