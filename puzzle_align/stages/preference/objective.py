"""What a preference stage trains for: the loss of a pair, and the metrics of many.

Shapes: B pairs, K = 2 responses a pair (chosen, rejected), C values a pair.
"""

from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch

from puzzle_align.algos.preference import PairLogps, preference_loss
from puzzle_align.algos.reward import bradley_terry_loss
from puzzle_align.config.job import JobConfig
from puzzle_align.config.sections.preference import DPOConfig, RewardLossConfig
from puzzle_align.config.stages import STAGES
from puzzle_align.telemetry import preference_metrics, reward_metrics

CHOSEN, REJECTED = 0, 1


@dataclass(frozen=True)
class PairOutputs:
    """What models made of B pairs, and what the loss has to know of these."""

    outputs: torch.Tensor  # [B, K], the trained model's: summed log-probabilities, or rewards
    reference: torch.Tensor  # [B, K], the reference's summed log-probabilities; zeros without one
    lengths: torch.Tensor  # int64 [B, K], tokens of every response
    margins: torch.Tensor  # [B]
    mean_chosen_length: float  # tokens of a chosen response, of all pairs that the loss averages


class Objective(Protocol):
    """A loss over pairs, and its metrics. The denominator is the caller's."""

    reads_margins: ClassVar[bool]  # whether the loss reads those of the data

    @property
    def num_values(self) -> int:
        """C."""
        ...

    def losses(self, pairs: PairOutputs) -> tuple[torch.Tensor, torch.Tensor]:
        """Losses [B], differentiable, and what the metrics need of every pair, float64 [B, C]."""
        ...

    def metrics(self, values: torch.Tensor) -> dict[str, float]:
        """By name, from what ``losses`` gave for all pairs of a batch: float64 [n, C]."""
        ...


@dataclass(frozen=True)
class DPOObjective:
    """DPO and its family: a policy against a frozen reference."""

    config: DPOConfig
    reads_margins: ClassVar[bool] = False

    @property
    def num_values(self) -> int:
        """See ``Objective``."""
        return len(preference_metrics.NAMES)

    def losses(self, pairs: PairOutputs) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``Objective``."""
        return dpo_losses(self.config, pairs)

    def metrics(self, values: torch.Tensor) -> dict[str, float]:
        """See ``Objective``."""
        return preference_metrics.means(values)


@dataclass(frozen=True)
class RewardObjective:
    """Bradley-Terry: a reward model that puts the chosen response above the rejected one."""

    config: RewardLossConfig
    reads_margins: ClassVar[bool] = True

    @property
    def num_values(self) -> int:
        """See ``Objective``."""
        return reward_metrics.NUM_VALUES

    def losses(self, pairs: PairOutputs) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``Objective``."""
        chosen, rejected = pairs.outputs[:, CHOSEN], pairs.outputs[:, REJECTED]
        coefficient = self.config.center_rewards_coefficient
        losses = bradley_terry_loss(
            chosen, rejected, pairs.margins, center_rewards_coefficient=coefficient
        )
        return losses, reward_metrics.pair_values(losses, chosen, rejected)

    def metrics(self, values: torch.Tensor) -> dict[str, float]:
        """See ``Objective``."""
        return reward_metrics.summarize(values)


_BY_LOSS = {"dpo": DPOObjective, "reward_loss": RewardObjective}  # the config's section of it


def objective_of(job: JobConfig) -> Objective:
    """What the job's stage trains for."""
    section = STAGES[job.stage].loss
    return _BY_LOSS[section](getattr(job, section))


def dpo_losses(config: DPOConfig, pairs: PairOutputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Losses [B] and values [B, C] of B pairs under DPO."""
    logps = PairLogps(
        chosen=pairs.outputs[:, CHOSEN],
        rejected=pairs.outputs[:, REJECTED],
        ref_chosen=pairs.reference[:, CHOSEN],
        ref_rejected=pairs.reference[:, REJECTED],
        chosen_lengths=pairs.lengths[:, CHOSEN],
        rejected_lengths=pairs.lengths[:, REJECTED],
        mean_chosen_length=pairs.mean_chosen_length,
    )
    losses, chosen_rewards, rejected_rewards = preference_loss(logps, config)
    chosen, rejected = logps.chosen, logps.rejected
    if config.compares_means:
        chosen, rejected = logps.chosen_means, logps.rejected_means
    values = preference_metrics.pair_values(
        losses, chosen_rewards, rejected_rewards, chosen, rejected
    )
    return losses, values
