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
    baselines: torch.Tensor | None = None  # scores of greedy responses, [n]; NaN: it has none
    scale_rewards: str = "none"  # group, batch or none
    batch_std: torch.Tensor | None = None  # of all owners' scored responses' rewards, for batch

    def of_tokens(self) -> torch.Tensor:
        """Rewards of the tokens, float64 [n, T], 0 elsewhere."""
        return self.rewards.double().masked_fill(~self.mask, 0.0)

    def of_responses(self) -> torch.Tensor:
        """Rewards of the responses: the sums of their tokens', float64 [n]."""
        return self.of_tokens().sum(dim=1)

    def in_group(self, values: torch.Tensor) -> torch.Tensor:
        """Sum of the values [n] of the scored responses to each response's prompt, float64 [n]."""
        number = int(self.prompts.max()) + 1 if len(self.prompts) else 0
        sums = torch.zeros(number, dtype=torch.float64)
        scored = values.double().masked_fill(~self.has_score, 0.0)
        return sums.index_add_(0, self.prompts, scored)[self.prompts]

    def group_sizes(self) -> torch.Tensor:
        """Number of the scored responses to each response's prompt, float64 [n]."""
        return self.in_group(torch.ones_like(self.prompts))

    def over_tokens(self, advantages: torch.Tensor) -> torch.Tensor:
        """Give every token its response's advantage [n], before ``ppo.whiten_advantages``.

        It is 0 without another scored response to the prompt.
        """
        return advantages.masked_fill(self.group_sizes() <= 1, 0.0)[:, None] * self.mask


# Advantages [n, T], and the critic's targets [n, T]; None without a critic.
Estimate = tuple[torch.Tensor, torch.Tensor | None]


def estimator(name: str) -> Callable[[Samples], Estimate]:
    """Import an estimator by its name in ``config.sections.rl``."""
    return import_module(f"{__name__}.{name}").estimate
