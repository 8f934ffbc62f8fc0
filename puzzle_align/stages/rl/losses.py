"""What actor and critic are trained for, on one row: the loss's share, and the metrics' sums.

Shapes: N response tokens and R responses in a row; C columns of a token (``experience.LEARNED``).
"""

from dataclasses import dataclass
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
from puzzle_align.config.sections.rl import PPOConfig
from puzzle_align.runtime.row_input import OutputKind
from puzzle_align.stages.rl.experience import LEARNED


@dataclass(frozen=True)
class ActorLoss:
    """The clipped surrogate, less the entropy bonus, plus the KL where it is in the loss."""

    config: PPOConfig
    kl_coef: float
    num_tokens: int  # response tokens of the mini-batch

    output_kind: ClassVar[OutputKind] = "tokens"
    names: ClassVar[tuple[str, ...]] = (*POLICY_SUMS, "policy/entropy_avg")

    def __call__(
        self, output: torch.Tensor, columns: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``(scalar, sums [5])`` from log-probabilities and entropies [2, N] and columns [N, C]."""
        config, (logps, entropies) = self.config, output.unbind()
        low, high = config.clip_ratio_low, config.clip_ratio_high
        loss, sums = policy_loss(
            logps,
            _column(columns, "old_logps"),
            _column(columns, "advantages"),
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
                _column(columns, "ref_logps"),
                estimator=cast(KLEstimator, config.kl_estimator),
                coefficient=self.kl_coef,
                num_tokens=self.num_tokens,
            )
        return loss, torch.cat([sums, entropies.detach().double().sum()[None]])


@dataclass(frozen=True)
class CriticLoss:
    """The clipped squared error of the values."""

    config: PPOConfig
    num_tokens: int  # response tokens of the mini-batch

    output_kind: ClassVar[OutputKind] = "states"
    names: ClassVar[tuple[str, ...]] = VALUE_SUMS

    def __call__(
        self, output: torch.Tensor, columns: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As the actor's, from values [N + R] (before tokens, then after the last) and columns."""
        return value_loss(
            output[: len(columns)],
            _column(columns, "old_values"),
            _column(columns, "returns"),
            clip_range=self.config.cliprange_value,
            num_tokens=self.num_tokens,
        )


PPOLoss = ActorLoss | CriticLoss


def _column(columns: torch.Tensor, name: str) -> torch.Tensor:
    return columns[:, LEARNED.index(name)]
