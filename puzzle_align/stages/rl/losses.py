"""Losses of actor and critic on one row: the row's share, and the metrics' sums.

Shapes: N response tokens and R responses in a row; every column of the table is [N].
"""

from collections.abc import Mapping
from typing import ClassVar, cast

import torch

from puzzle_align.algos.advantages import KLEstimator
from puzzle_align.algos.ppo import (
    POLICY_SUMS,
    VALUE_SUMS,
    entropy_bonus,
    kl_loss,
    policy_loss,
    value_loss,
)
from puzzle_align.config.job import JobConfig
from puzzle_align.config.sections.rl import PPOConfig
from puzzle_align.layout.job_plan import Workload
from puzzle_align.runtime.row_input import OutputKind, Reading, RowInput

# Outputs of each role for a sample: log-probabilities of its tokens; values of the states before
# its tokens and after the last; its reward.
_OUTPUT_KINDS: dict[str, OutputKind] = {
    "actor": "tokens",
    "reference": "tokens",
    "critic": "states",
    "reward": "responses",
}


def reading_of(config: JobConfig, role: str, workload: Workload) -> Reading:
    """Reading of rows by a role's context; the policy uses the sampling temperature.

    Greedy sampling has none: then log-probabilities are of the plain distribution.
    """
    return Reading(
        output_kind=_OUTPUT_KINDS[role],
        temperature=config.generation.temperature or 1.0,
        entropies=(role, workload) == ("actor", "train"),
    )


class ActorLoss:
    """Clipped surrogate, minus the entropy bonus, plus the KL if it is in the loss."""

    names: ClassVar[tuple[str, ...]] = (*POLICY_SUMS, "policy/entropy_avg")

    def __init__(
        self, config: PPOConfig, num_tokens: int, device: torch.device, kl_coef: float
    ) -> None:
        """Begin a mini-batch of ``num_tokens`` response tokens on all ranks."""
        self.config, self.num_tokens, self.kl_coef = config, num_tokens, kl_coef
        self.sums = torch.zeros(len(self.names), dtype=torch.float64, device=device)

    def __call__(
        self, _row: RowInput, outputs: torch.Tensor, columns: Mapping[str, torch.Tensor]
    ) -> torch.Tensor:
        """Return the row's share, from log-probabilities and entropies [2, N]."""
        config, (logps, entropies) = self.config, outputs.unbind()
        low, high = config.clip_ratio_low, config.clip_ratio_high
        loss, sums = policy_loss(
            logps,
            columns["old_logps"],
            columns["advantages"],
            clip_ratio_low=config.clip_ratio if low is None else low,
            clip_ratio_high=config.clip_ratio if high is None else high,
            clip_ratio_c=config.clip_ratio_c,
            num_tokens=self.num_tokens,
        )
        if config.entropy_coeff:
            loss = loss + entropy_bonus(
                entropies, coefficient=config.entropy_coeff, num_tokens=self.num_tokens
            )
        if config.use_kl_loss:
            loss = loss + kl_loss(
                logps,
                columns["ref_logps"],
                estimator=cast(KLEstimator, config.kl_estimator),
                coefficient=self.kl_coef,
                num_tokens=self.num_tokens,
            )
        self.sums.add_(torch.cat([sums, entropies.detach().double().sum()[None]]))
        return loss


class CriticLoss:
    """Clipped squared error of the values."""

    names: ClassVar[tuple[str, ...]] = VALUE_SUMS

    def __init__(self, config: PPOConfig, num_tokens: int, device: torch.device) -> None:
        """Begin a mini-batch of ``num_tokens`` response tokens on all ranks."""
        self.config, self.num_tokens = config, num_tokens
        self.sums = torch.zeros(len(self.names), dtype=torch.float64, device=device)

    def __call__(
        self, _row: RowInput, outputs: torch.Tensor, columns: Mapping[str, torch.Tensor]
    ) -> torch.Tensor:
        """Return the row's share, from values [N + R]: before tokens, then after the last."""
        loss, sums = value_loss(
            outputs[: len(columns["returns"])],
            columns["old_values"],
            columns["returns"],
            clip_range=self.config.cliprange_value,
            num_tokens=self.num_tokens,
        )
        self.sums.add_(sums)
        return loss


PPOLoss = ActorLoss | CriticLoss
