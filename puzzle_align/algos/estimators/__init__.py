"""Estimators of advantages: each is a module with ``estimate(samples)``, listed in the config.

The list is in ``config.sections.rl``. Shapes: n samples, T tokens of the longest one.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

import torch


@dataclass(frozen=True, kw_only=True)
class Samples:
    """Samples of one owner, a rank that has all responses to each of its prompts."""

    rewards: torch.Tensor  # of the tokens, float64 [n, T]
    mask: torch.Tensor  # bool [n, T], true at tokens
    has_score: torch.Tensor  # bool [n]; samples without a score get no advantage
    ended: torch.Tensor  # bool [n], whether the state after the last token has value 0
    prompts: torch.Tensor  # int64 [n], index of each sample's prompt
    gamma: float  # discount a token, in [0, 1]
    lam: float  # weight of longer estimates with a critic, in [0, 1]
    values: torch.Tensor | None = None  # a critic's, before the tokens, [n, T]
    final_values: torch.Tensor | None = None  # after the last tokens, [n]; not read where ended


# Advantages [n, T], and the critic's targets [n, T]; None without a critic.
Estimate = tuple[torch.Tensor, torch.Tensor | None]


def estimator(name: str) -> Callable[[Samples], Estimate]:
    """Import an estimator by its name in ``config.sections.rl``."""
    return import_module(f"{__name__}.{name}").estimate
