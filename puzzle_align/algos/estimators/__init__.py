"""Estimators of advantages: a module each, with ``estimate(samples)``.

Their rows are in ``config.sections.rl``.

Shapes: n samples, T tokens of the longest one.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

import torch


@dataclass(frozen=True, kw_only=True)
class Samples:
    """The samples of one owner, which has all responses to each of its prompts."""

    rewards: torch.Tensor  # of the tokens, float64 [n, T]
    mask: torch.Tensor  # bool [n, T], the tokens
    has_score: torch.Tensor  # bool [n]; others are given no advantage
    ended: torch.Tensor  # bool [n], whether nothing more would be earned after the last token
    prompts: torch.Tensor  # int64 [n], equal where samples answer the same prompt
    gamma: float
    lam: float
    values: torch.Tensor | None = None  # a critic's, before the tokens, [n, T]
    final_values: torch.Tensor | None = None  # a critic's, after the last tokens, [n]


# Advantages [n, T], and the targets of the critic [n, T], None without one.
Estimate = tuple[torch.Tensor, torch.Tensor | None]


def estimator(name: str) -> Callable[[Samples], Estimate]:
    """The estimator of a name in ``config.sections.rl``."""
    return import_module(f"{__name__}.{name}").estimate
